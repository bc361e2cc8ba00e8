import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivetrain_checkpoint import CheckpointLockedError, FolderNotSharedError
from drivetrain_checkpoint.saving import writer_lock
from drivetrain_checkpoint.saving.writer_lock import LOCK_FILE, WriterLock, check_shared

HOLDER = """
import os, signal, sys
from pathlib import Path
from drivetrain_checkpoint.saving.writer_lock import WriterLock
held = WriterLock(Path(sys.argv[1]))
held.take()
print(os.getpid(), flush=True)
signal.pause()
"""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_lock, "_PATIENCE_SECONDS", 0.1)


@pytest.fixture
def holder(python: str, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the lock."""
    with subprocess.Popen(
        [python, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


@pytest.mark.usefixtures("impatient")
def test_a_second_process_is_refused_until_the_first_is_gone(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert holder.stdout is not None
    pid = int(holder.stdout.readline())
    with pytest.raises(
        CheckpointLockedError, match=rf"written by another run \(process {pid} on .*stop it, or save"
    ):
        WriterLock(tmp_path).take()
    os.kill(pid, signal.SIGKILL)  # the one that has the lock: `python` may have forked it elsewhere
    holder.wait()
    WriterLock(tmp_path).take()


def test_one_process_may_write_twice_and_the_second_goes_on(tmp_path: Path) -> None:
    first, second = WriterLock(tmp_path), WriterLock(tmp_path)
    token = first.take()
    assert second.take() == token == first.take()
    check_shared(tmp_path, token, rank=1)
    first.release()
    assert second.take() != token


def test_what_is_forgotten_is_given_back(tmp_path: Path) -> None:
    token = WriterLock(tmp_path).take()
    assert WriterLock(tmp_path).take() != token


def test_a_rank_that_sees_another_folder_is_told(tmp_path: Path) -> None:
    token, _ = WriterLock(tmp_path / "one").take(), WriterLock(tmp_path / "two").take()
    check_shared(tmp_path / "one", token, rank=3)
    for directory in (tmp_path / "two", tmp_path / "three"):
        with pytest.raises(FolderNotSharedError, match=r"rank 3 on .* does not see"):
            check_shared(directory, token, rank=3)


def test_a_torn_file_is_no_holder_and_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text('{"host": "x", "pi')
    with pytest.raises(FolderNotSharedError):
        check_shared(tmp_path, "any", rank=1)
    token = WriterLock(tmp_path).take()
    assert json.loads((tmp_path / LOCK_FILE).read_text())["token"] == token


def test_a_file_that_was_cleared_away_is_made_again(tmp_path: Path) -> None:
    held = WriterLock(tmp_path)
    first = held.take()
    (tmp_path / LOCK_FILE).unlink()
    with pytest.raises(FolderNotSharedError):
        check_shared(tmp_path, first, rank=1)
    token = held.take()
    assert json.loads((tmp_path / LOCK_FILE).read_text())["token"] == token
    with (tmp_path / LOCK_FILE).open() as file, pytest.raises(BlockingIOError):  # the new file is locked
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


FORKS = """
import os, sys, time
from pathlib import Path
from drivetrain_checkpoint.saving.writer_lock import WriterLock
held = WriterLock(Path(sys.argv[1]))
held.take()
reads, writes = os.pipe()
if os.fork() == 0:  # as a worker of a loader
    del held
    os.write(writes, b"x")
    time.sleep(120)
    os._exit(0)
os.read(reads, 1)
if sys.argv[2] == "release":
    held.release()
print(flush=True)
if sys.argv[2] != "kill":
    time.sleep(120)
os.kill(os.getpid(), 9)
"""


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("end", ["release", "kill", "hold"])
def test_a_child_does_not_keep_it_and_does_not_end_it(tmp_path: Path, end: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FORKS, str(tmp_path), end],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        if end == "kill":
            process.wait()
        try:
            if end == "hold":
                with pytest.raises(CheckpointLockedError):
                    WriterLock(tmp_path).take()
            else:
                token = WriterLock(tmp_path).take()
                assert json.loads((tmp_path / LOCK_FILE).read_text())["token"] == token
        finally:
            os.killpg(process.pid, signal.SIGKILL)
