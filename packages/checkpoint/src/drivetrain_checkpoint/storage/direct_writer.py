"""Writing a file past the operating system's cache.

Nobody reads a checkpoint soon. In the cache it takes the place of what training reads, and where the machine has no
pages at hand, finding them costs the processor more than handing the bytes to the disk.
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

BUFFER_BYTES = 8 * 2**20  # there are two
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
_ALIGNMENT = 4096  # of places, sizes and memory that pass the cache by: a multiple of what disks ask for


class DiskWriter:
    """A new file: one buffer of it is gathered while the one before is on its way to the disk.

    Where the file system (or the operating system: Linux alone can) knows only writes through its cache, they go
    there.

    Args:
        path: Where; it must not exist.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)
        self._passes_cache = _pass_cache(self._file, True)
        self._gathered = mmap(
            -1, BUFFER_BYTES
        )  # shared with forked children: never copied while it is under way
        self._size_bytes = 0  # of what is gathered
        self._spare: mmap | None = None
        self._under_way: Task[None] | None = None

    def write(self, data: memoryview) -> None:
        """Append to it."""
        while len(data):
            room = memoryview(self._gathered)[self._size_bytes : self._size_bytes + len(data)]
            _copy(data[: len(room)], room)
            self._size_bytes += len(room)
            data = data[len(room) :]
            if self._size_bytes == BUFFER_BYTES:
                self._set_off()

    def finish(self) -> None:
        """Force it to the disk."""
        self._arrive()
        last = memoryview(self._gathered)[: self._size_bytes]
        whole = len(last) - len(last) % _ALIGNMENT
        self._put(last[:whole])
        self._use_cache()
        self._put(last[whole:])
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let go of it, as it is."""
        if self._under_way is not None:
            self._under_way.wait()
        self._file.close()

    def _set_off(self) -> None:
        self._arrive()
        full = self._gathered
        self._under_way = Task(lambda: self._put(memoryview(full)))
        self._gathered, self._spare = self._spare or mmap(-1, BUFFER_BYTES), full
        self._size_bytes = 0

    def _arrive(self) -> None:
        """Wait for what is under way.

        Raises:
            OSError: It did not get there.
        """
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
                # A file system may refuse only now, and so it does what is left of a write that the disk had not
                # quite room for.
                if error.errno not in _REFUSALS or not self._passes_cache:
                    raise
                self._use_cache()

    def _use_cache(self) -> None:
        if self._passes_cache:
            self._passes_cache = _pass_cache(self._file, False)


def _pass_cache(file: FileIO, wanted: bool) -> bool:
    """Have what is written to a file pass the cache by, or not; whether it does."""
    if fcntl is None or not hasattr(os, "O_DIRECT"):
        return False
    # Not by open(): where the file system refuses that, it has made the file nevertheless.
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        return False
    return wanted


def _copy(source: memoryview, target: memoryview) -> None:
    """Copy bytes. Other threads run meanwhile, which they do not while one view is assigned to another."""
    if source.readonly:  # text: short
        target[:] = source
    else:
        ctypes.memmove(_address_of(target), _address_of(source), len(source))


def _address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
