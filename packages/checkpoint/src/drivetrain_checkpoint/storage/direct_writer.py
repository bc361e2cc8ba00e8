"""Write a file with direct I/O, which bypasses the page cache.

A checkpoint is not read again soon. In the page cache it would evict the data that training reads, and when memory is
scarce, reclaiming pages costs more CPU time than writing the bytes to the disk.
"""

import ctypes
import errno
import os
from io import FileIO
from mmap import mmap
from pathlib import Path

from drivetrain_checkpoint.storage.threads import Task

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

BUFFER_BYTES = 8 * 2**20  # of each of the two buffers
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
_ALIGNMENT = 4096  # of offsets, sizes and memory for direct I/O: a multiple of what disks require


class DiskWriter:
    """A writer of a new file, with direct I/O where Linux allows it: one buffer fills while the other is written."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)
        self._passes_cache = _pass_cache(self._file, True)
        # Anonymous mmap is shared with forked children: a fork during a direct write must not copy its pages.
        self._gathered = mmap(-1, BUFFER_BYTES)
        self._size_bytes = 0  # filled so far in the current buffer
        self._spare: mmap | None = None
        self._under_way: Task[None] | None = None

    def write(self, data: memoryview) -> None:
        """Append `data` to the file."""
        while len(data):
            room = memoryview(self._gathered)[self._size_bytes : self._size_bytes + len(data)]
            if data.readonly:  # short text; from_buffer needs writable memory
                room[:] = data[: len(room)]
            else:  # without holding the GIL, unlike an assignment between views
                ctypes.memmove(_address_of(room), _address_of(data), len(room))
            self._size_bytes += len(room)
            data = data[len(room) :]
            if self._size_bytes == BUFFER_BYTES:
                self._arrive()  # from now on the spare buffer is free
                full = self._gathered
                self._under_way = Task(lambda full=full: self._put(memoryview(full)))
                self._gathered, self._spare = self._spare or mmap(-1, BUFFER_BYTES), full
                self._size_bytes = 0

    def finish(self) -> None:
        """Write the rest and sync the file to the disk."""
        self._arrive()
        last = memoryview(self._gathered)[: self._size_bytes]
        whole = len(last) - len(last) % _ALIGNMENT
        self._put(last[:whole])
        self._use_cache()  # direct I/O cannot write the unaligned rest
        self._put(last[whole:])
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Wait for the write under way, then close the file without writing the rest."""
        if self._under_way is not None:
            self._under_way.wait()
        self._file.close()

    def _arrive(self) -> None:
        """Wait for the write under way."""
        if self._under_way is not None:
            task = self._under_way
            task.wait()
            self._under_way = None
            task.result()

    def _put(self, data: memoryview) -> None:
        while len(data):
            try:
                data = data[self._file.write(data) :]
            except OSError as error:
                # Some file systems refuse direct I/O only at the first write. All refuse the unaligned rest of a
                # partial write, as on a disk that is almost full.
                if error.errno not in _REFUSALS or not self._passes_cache:
                    raise
                self._use_cache()

    def _use_cache(self) -> None:
        if self._passes_cache:
            self._passes_cache = _pass_cache(self._file, False)


def _pass_cache(file: FileIO, wanted: bool) -> bool:
    """Turn direct I/O of a file on or off, and return whether it is on."""
    if fcntl is None or not hasattr(os, "O_DIRECT"):
        return False
    # Not with open(): a file system that refuses the flag there has created the file nevertheless.
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        return False
    return wanted


def _address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
