"""The keeper process, with pipes in place of ranks."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from drivetrain_launcher.run.keeper.keeper import Keeper
from drivetrain_launcher.run.keeper.keeper_messages import KeeperOptions, Stream
from drivetrain_launcher.run.keeper.sessions import (
    end_sessions,
    has_keeper,
    kill_sessions,
    leaders_with,
    members_of,
)
from launcher.run.running import wait_until

# Starts a subprocess with a process group of its own, tells both process ids, and waits.
FAMILY = (
    "import os, subprocess, time\n"
    "child = subprocess.Popen(['sleep', '300'], process_group=0)\n"
    "print(os.getpid(), child.pid, flush=True)\n"
    "time.sleep(300)\n"
)
# A launcher that starts a rank, tells the keeper of it or not, and is killed.
LAUNCHER = f"""
import os, signal, subprocess, sys
from drivetrain_launcher.run.keeper.keeper import Keeper
from drivetrain_launcher.run.keeper.keeper_messages import KeeperOptions

keeper = Keeper(KeeperOptions(launcher=os.getpid(), grace_seconds=0.3, are_same=False, terminals=(False, False)))
keeper.begin_attempt("TEST_TOKEN=" + sys.argv[1])
environment = {{**os.environ, "TEST_TOKEN": sys.argv[1]}}
rank = subprocess.Popen([sys.executable, "-c", {FAMILY!r}], env=environment, start_new_session=True)
if sys.argv[2] == "told":
    keeper.set_ranks([rank.pid])
os.kill(os.getpid(), signal.SIGKILL)
"""


@contextmanager
def keeping() -> Iterator[Keeper]:
    options = KeeperOptions(launcher=os.getpid(), grace_seconds=1.0, are_same=False, terminals=(False, False))
    with Keeper(options) as keeper:
        keeper.begin_attempt("NONE=at all")
        yield keeper


def keeper_pid() -> int:
    listed = subprocess.run(["ps", "-ewwo", "pid,args"], capture_output=True, text=True, check=True).stdout
    rows = [row.split(None, 1) for row in listed.splitlines()]
    return next(int(pid) for pid, words in rows if f'"launcher": {os.getpid()},' in words)


def test_streams_are_shown_and_written_to_files_and_their_last_lines_kept(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (first, into_first), (second, into_second) = os.pipe(), os.pipe()
    with keeping() as keeper:
        keeper.add_stream(Stream(rank=0, shown_on=1, is_leading=True), first)
        file = str(tmp_path / "stdout.log")
        keeper.add_stream(Stream(rank=1, shown_on=1, prefix="[1] ", file=file), second)
        os.write(into_second, b"a\nb\nc")
        keeper.say("told")
        keeper.drain()
        assert keeper.last_lines(1, 2) == ["b", "c"]
        assert keeper.last_lines(1, 0) == keeper.last_lines(7, 5) == []
        os.write(into_first, b"\rbar")
        keeper.drain()
    seen = capfd.readouterr()
    assert seen.out == "[1] a\n[1] b\n[1] c\n\rbar\n"
    assert seen.err == "drivetrain: told\n"
    assert Path(file).read_bytes() == b"a\nb\nc"


def test_a_file_that_cannot_be_written_is_told_and_the_output_still_shown(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ours, theirs = os.pipe()
    with keeping() as keeper:
        keeper.add_stream(Stream(rank=1, shown_on=1, file="/dev/full"), ours)
        os.write(theirs, b"line\n")
        keeper.drain()
        os.write(theirs, b"another\n")
        keeper.drain()
    seen = capfd.readouterr()
    assert seen.out == "line\nanother\n"
    assert seen.err.count("/dev/full: No space left on device; the output is written there no more") == 1


def test_a_killed_keeper_is_replaced_and_the_streams_go_on(capfd: pytest.CaptureFixture[str]) -> None:
    ours, theirs = os.pipe()
    with keeping() as keeper:
        keeper.add_stream(Stream(rank=1, shown_on=1), ours)
        keeper.drain()
        os.kill(keeper_pid(), signal.SIGKILL)
        os.write(theirs, b"meanwhile\n")
        wait_until(lambda: not has_keeper(os.getpid()))
        # The kernel empties a killed process before its parent can know of its end.
        wait_until(lambda: keeper.ensure_running() or has_keeper(os.getpid()))
        os.write(theirs, b"afterwards\n")
        keeper.drain()
    assert not has_keeper(os.getpid())
    seen = capfd.readouterr()
    assert seen.out == "meanwhile\nafterwards\n"
    assert seen.err == ""  # it does not take the end of the block for the launcher's death


@pytest.mark.parametrize("told", ["told", "being started"])
@pytest.mark.default_cases("told")
def test_what_a_killed_launcher_has_started_ends_with_it(told: str, tmp_path: Path) -> None:
    # Its output is a pipe, which ends when neither the rank nor its child nor the keeper holds it.
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, str(tmp_path), told],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert "died; its ranks stop, and have 0.3 s to save" in done.stderr
    assert leaders_with(f"TEST_TOKEN={tmp_path}") == []


def test_a_session_has_members_whatever_their_process_groups(tmp_path: Path) -> None:
    environment = {**os.environ, "TEST_TOKEN": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", FAMILY],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        leader, child = map(int, process.stdout.readline().split())
        assert members_of([leader]) == sorted([leader, child])
        assert leaders_with(f"TEST_TOKEN={tmp_path}") == [leader]
        end_sessions([leader], seconds=30)
        assert process.wait(30) == -signal.SIGTERM
    assert members_of([leader]) == []
    kill_sessions([])
