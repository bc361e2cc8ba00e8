"""Append records to a spool without ever stopping the training that writes them."""

import errno
import logging
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from drivetrain_tracking.errors import SpoolInUseError, TrackerStateError
from drivetrain_tracking.run.run_state import in_forked_children
from drivetrain_tracking.spool.files import open_alone, unlock
from drivetrain_tracking.spool.line import encode
from drivetrain_tracking.values.plain import Plain

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 16


class Spool:
    """A file of records that one process appends to, from any of its threads.

    A record is with the operating system when `append` returns: it survives the end of this process by any signal. It
    survives the end of the machine after the next flush, which a thread of the spool makes every `flush_seconds`.

    A disk that is full or fails does not stop training. Records that could not be written are counted, with one
    warning, and a record with their number follows when the disk takes records again. The first flush that fails logs
    a warning, and so does the next flush that succeeds.

    Args:
        path: The file, created if it is missing; an unfinished line of a killed process is removed first.
    """

    def __init__(self, path: Path, *, flush_seconds: float = 1.0) -> None:
        self.num_lost = 0
        self._path = path
        self._num_lost_told = 0
        self._lock = threading.RLock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: int | None = open_alone(
            path,
            taken=SpoolInUseError(
                f"{path}: another run logs to this file; give each run a folder of its own, or end the other one "
                "first"
            ),
        )
        self._end = _cut_unfinished_line(self._file)
        self._can_flush = True
        self._written = threading.Event()
        self._closing = threading.Event()
        self._flusher = threading.Thread(
            target=self._flush_often, args=(self._file, flush_seconds), name="drivetrain spool", daemon=True
        )
        self._flusher.start()
        # An flock lasts until every process that has the file open closes it.
        in_forked_children(self, Spool.forget)

    def append(self, record: Mapping[str, Plain]) -> None:
        """Append a record; if the disk fails, count the lost record and raise nothing."""
        line = encode(record)
        with self._lock:
            if self._file is None:
                raise TrackerStateError(f"append() to {self._path}, which is closed")
            if self.num_lost > self._num_lost_told:
                # One write for both: the record of what was lost goes only together with one that was not.
                line = encode({"event": "lost", "count": self.num_lost - self._num_lost_told}) + line
            try:
                if os.pwrite(self._file, line, self._end) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                with suppress(OSError):  # a part of a line is no record, and the next one is written over it
                    os.ftruncate(self._file, self._end)
                self.lose(error)
                return
            self._end += len(line)
            self._num_lost_told = self.num_lost
            self._written.set()

    def lose(self, error: OSError) -> None:
        """Count a record, or a part of a record, that could not be written; warn of the first loss."""
        with self._lock:
            if self.num_lost == self._num_lost_told:  # the first since the last record that went
                logger.warning(
                    "%s cannot be written (%s): training goes on, and what is logged meanwhile is lost and counted",
                    error.filename or self._path,
                    os.strerror(error.errno or errno.EIO),
                )
            self.num_lost += 1

    def close(self) -> None:
        """Flush and close the file. A second call does nothing."""
        if self._file is None:
            return
        self._closing.set()
        self._written.set()
        self._flusher.join()
        with self._lock:
            unlock(self._file)
            os.close(self._file)
            self._file = None
        if self.num_lost:
            logger.warning("%d records could not be written to %s", self.num_lost, self._path)

    def forget(self) -> None:
        """Close the file in a forked child, without a flush or an unlock, since the parent still uses the file."""
        self._lock = threading.RLock()  # a thread of the parent may have held the other
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _flush_often(self, file: int, seconds: float) -> None:
        while not self._closing.wait(seconds):
            self._flush(file)
            self._written.wait()
        self._flush(file)

    def _flush(self, file: int) -> None:
        """Flush the file; warn when flushes begin to fail, and when a flush succeeds again."""
        if not self._written.is_set():
            return
        self._written.clear()
        could_flush, self._can_flush = self._can_flush, True
        try:
            os.fdatasync(file)
        except OSError as error:
            self._can_flush = False
            if could_flush:
                logger.warning(
                    "%s cannot be flushed to the disk (%s): training goes on; if the machine stops before this is "
                    "told to be over, what was logged from now on may be lost",
                    self._path,
                    os.strerror(error.errno or errno.EIO),
                )
        if self._can_flush and not could_flush:
            logger.warning("%s is flushed to the disk again", self._path)


def _cut_unfinished_line(file: int) -> int:
    """Remove an unfinished line of a killed process, and return the new end. No reader has passed that line."""
    end = os.lseek(file, 0, os.SEEK_END)
    whole = end
    while whole > 0:
        start = max(0, whole - _CHUNK_BYTES)
        if (found := os.pread(file, whole - start, start).rfind(b"\n")) >= 0:
            whole = start + found + 1
            break
        whole = start
    if whole < end:
        os.ftruncate(file, whole)
    return whole
