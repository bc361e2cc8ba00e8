import errno
import fcntl
import logging
import os
from pathlib import Path

import pytest

from drivetrain_tracking.spool.files import open_alone, unlock


def test_a_file_is_open_to_one_until_it_unlocks(tmp_path: Path) -> None:
    path, taken = tmp_path / "file", RuntimeError("taken")
    first = open_alone(path, taken=taken)
    with pytest.raises(RuntimeError, match="taken"):
        open_alone(path, taken=taken)
    unlock(first)
    second = open_alone(path, taken=taken)
    os.close(first)
    os.close(second)


def test_a_file_system_without_locks_is_told_of_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with caplog.at_level(logging.WARNING):
        file = open_alone(tmp_path / "file", taken=RuntimeError("taken"))
    unlock(file)
    os.close(file)
    (message,) = caplog.messages
    assert (
        "has no locks ([Errno 37] No locks available): a second process that writes there is not noticed"
        in message
    )
