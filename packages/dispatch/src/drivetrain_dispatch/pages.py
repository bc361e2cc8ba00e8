"""Pages of mapped files: which are in memory, and bringing them there ahead of their use. Linux alone."""

import ctypes
import mmap
import sys
from collections.abc import Iterator
from ctypes import CDLL, c_int, c_size_t, c_ubyte, c_void_p
from functools import cache

from torch import Tensor

_PAGE_BYTES = mmap.PAGESIZE
_POPULATE_READ = 22  # madvise: MADV_POPULATE_READ, from Linux 5.14 on
_STEP_BYTES = 8 << 20  # brought in one call: how soon a thread that should stop does


class Pages:
    """The pages of a tensor that is a mapped file's.

    Args:
        tensor: A contiguous one on the host.
    """

    def __init__(self, tensor: Tensor) -> None:
        first = tensor.data_ptr() // _PAGE_BYTES * _PAGE_BYTES
        self._first = first
        self.size_bytes = max(0, tensor.data_ptr() + tensor.nbytes - first)

    def missing_bytes(self) -> int:
        """How many bytes are not in memory; 0 where the system does not say."""
        libc = _libc()
        if libc is None or self.size_bytes == 0:
            return 0
        found = (c_ubyte * -(-self.size_bytes // _PAGE_BYTES))()
        if libc.mincore(self._first, self.size_bytes, found) != 0:
            return 0
        return (len(found) - bytes(found).count(1)) * _PAGE_BYTES

    def steps(self) -> Iterator[tuple[int, int]]:
        """The pages as pieces (address, bytes) that `bring` takes, in their order."""
        for start in range(0, self.size_bytes, _STEP_BYTES):
            yield self._first + start, min(_STEP_BYTES, self.size_bytes - start)


def bring(address: int, size_bytes: int) -> bool:
    """Bring a piece of a mapping into memory, letting other threads run; False where the system cannot."""
    libc = _libc()
    return libc is not None and libc.madvise(address, size_bytes, _POPULATE_READ) == 0


@cache
def _libc() -> CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)  # its calls give up Python's lock, mmap.madvise keeps it
    libc.mincore.argtypes = (c_void_p, c_size_t, c_void_p)
    libc.mincore.restype = c_int
    libc.madvise.argtypes = (c_void_p, c_size_t, c_int)
    libc.madvise.restype = c_int
    return libc
