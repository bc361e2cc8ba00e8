"""Allow one writer per directory of checkpoints: a locked file names the writer, and all ranks must see the file."""

import json
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from socket import gethostname
from typing import Any
from uuid import uuid4
from weakref import finalize, ref

from drivetrain_checkpoint.errors import CheckpointLockedError, FolderNotSharedError
from drivetrain_checkpoint.storage.place import Place, storage_of
from drivetrain_weights.regular_file import parse_json

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

logger = logging.getLogger(__name__)

LOCK_FILE = "writer.json"
_PATIENCE_SECONDS = 2.0  # a run that was just stopped may still be exiting
_PROCESS = uuid4().hex  # process ids are not unique across the containers of a host


class WriterLock:
    """The right to write into a directory, held from `take` until `release` or the end of the process.

    The operating system holds the lock: it cannot expire, and a crash leaves nothing to clean up.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._token = uuid4().hex
        self._descriptor: int | None = None
        self._close: finalize[Any, Any] | None = None
        # Forked children close the lock file: an flock lasts until every process with the file open closes it.
        parents = ref(self)

        def forget() -> None:
            if (own := parents()) is not None:
                own.forget()

        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=forget)

    def take(self) -> str:
        """Take the lock, if not yet held. Writers in the same process count as one run and share the lock.

        Returns:
            A random token, also written to the lock file: a rank that reads another token sees another directory.

        Raises:
            CheckpointLockedError: Another process holds the lock; the message names it.
        """
        descriptor = self._open()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not _lock(descriptor, self._directory):
            holder = _read(self._directory)
            # Another WriterLock of this process holds the lock. Compare pids too: forked children inherit _PROCESS.
            if (holder.get("process"), holder.get("pid")) == (_PROCESS, os.getpid()):
                return str(holder["token"])
            if time.monotonic() > deadline:
                raise CheckpointLockedError(
                    f"{self._directory} is written by another run (process {holder.get('pid')} on "
                    f"{holder.get('host')}, since {holder.get('since')}): stop it, or save into another folder"
                )
            time.sleep(0.05)
        if _read(self._directory).get("token") != self._token:
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            process = {"host": gethostname(), "pid": os.getpid(), "process": _PROCESS}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({**process, "since": since, "token": self._token}).encode(), 0)
            os.fsync(descriptor)  # so that other hosts see it
        return self._token

    def release(self) -> None:
        """Release the lock."""
        if self._close is not None:
            self._close()
            self._close = self._descriptor = None

    def forget(self) -> None:
        """Close the file descriptor inherited from the parent process, without releasing the parent's lock."""
        if self._close is not None and self._descriptor is not None:
            self._close.detach()
            os.close(self._descriptor)
            self._close = self._descriptor = None

    def _open(self) -> int:
        """Return a descriptor of the lock file; create the file again if it was deleted."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / LOCK_FILE
        if self._descriptor is not None:
            try:
                is_there = os.path.samestat(os.fstat(self._descriptor), path.stat())
            except FileNotFoundError:
                is_there = False
            if not is_there:
                self.release()
        if self._descriptor is None:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            self._close = finalize(self, _close, self._descriptor, os.getpid())
        return self._descriptor


def lock_of(directory: Place) -> WriterLock | None:
    """Return the lock of a directory; None for an object store, which has no locks."""
    return WriterLock(directory) if isinstance(directory, Path) else None


def check_shared(directory: Place, token: str, rank: int) -> None:
    """Check that this rank sees the directory that rank 0 writes into."""
    if _read(directory).get("token") != token:
        raise FolderNotSharedError(
            f"rank {rank} on {gethostname()} does not see in {directory} what rank 0 wrote there: it is a folder of "
            "one host; save into a folder that every host mounts"
        )


def _lock(descriptor: int, directory: Path) -> bool:
    """Try to lock a file; return False if another process holds the lock. Without lock support, return True."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning(
            "%s has no locks (%s): a second run that writes there is not noticed", directory, error
        )
    return True


def _close(descriptor: int, opened_by: int) -> None:
    """Unlock and close a file. A mere close would keep the lock while a forked child has the file open."""
    if fcntl is not None and os.getpid() == opened_by:
        with suppress(OSError):  # the file system may have no locks
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _read(directory: Place) -> dict[str, Any]:
    try:
        return parse_json(storage_of(directory).read_whole(directory / LOCK_FILE), where=LOCK_FILE)
    except (FileNotFoundError, ValueError):  # missing, or just being written
        return {}
