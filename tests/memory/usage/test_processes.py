import os
import subprocess
import sys
from pathlib import Path

import psutil

from drivetrain_memory.usage.processes import ProcessReader, descendants_of, start_time

GRANDCHILD = (
    "import subprocess, sys; subprocess.run([sys.executable, '-ISc', 'print(1, flush=True); input()'])"
)


def test_children_of_children_are_found_as_psutil_finds_them(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-ISc", GRANDCHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        found = descendants_of(child.pid)
        assert [key.pid for key in found] == [one.pid for one in psutil.Process(child.pid).children()]
        assert child.pid in [key.pid for key in descendants_of(os.getpid())]
        # without the kernel's files
        portable = descendants_of(child.pid, proc=tmp_path)
        assert [key.pid for key in portable] == [key.pid for key in found]
        assert all(start_time(key.pid) == key.started for key in found)
        child.communicate(b"\n")
    assert descendants_of(child.pid) == ()
    assert start_time(child.pid) is None


def test_a_reader_agrees_with_psutil_and_sees_the_end(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-ISc", "print(1, flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        readers = [ProcessReader(child.pid), ProcessReader(child.pid, proc=tmp_path)]
        expected = psutil.Process(child.pid).memory_info().rss
        for reader in readers:
            usage = reader.read()
            assert usage is not None
            # The kernel counts its pages in batches.
            assert abs(usage.resident_bytes - expected) < 2**20
            assert usage.shared_bytes <= usage.resident_bytes
        proportional = readers[0].proportional_bytes()
        assert proportional is None or 0 < proportional <= expected + 2**20
        assert readers[1].proportional_bytes() is None
        child.communicate(b"\n")
    assert [reader.read() for reader in readers] == [None, None]
    for reader in readers:
        reader.close()
