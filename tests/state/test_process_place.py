"""Whether another process on this host has ended."""

import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain_state.process_place import has_ended, own_place

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's files are Linux's")


def test_a_child_that_ends_is_noticed_before_and_after_it_is_reaped() -> None:
    here = own_place()
    assert here is not None
    assert not has_ended(here, here)
    code = (
        "import sys; from drivetrain_state.process_place import own_place; "
        "print(*own_place()[1:], flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        pid, started = map(int, child.stdout.readline().split())
        place = (here[0], pid, started)
        assert not has_ended(place, here)
        child.stdin.close()
        while not has_ended(place, here):  # a zombie until it is waited for
            pass
        child.wait()
        assert has_ended(place, here)


def test_an_id_that_another_process_has_now_is_not_taken_for_the_first() -> None:
    here = own_place()
    assert here is not None
    assert has_ended((here[0], here[1], here[2] - 1), here)


def test_processes_of_other_hosts_and_containers_are_not_judged(tmp_path: Path) -> None:
    here = own_place()
    assert here is not None
    assert not has_ended(("elsewhere", 2**30, 0), here)
    assert not has_ended((here[0], 2**30, 0), None)
    assert own_place(proc=tmp_path) is None
