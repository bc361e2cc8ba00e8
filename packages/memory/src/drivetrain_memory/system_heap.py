"""The heap of the system's allocator: how much of it is in use, and how to return the rest to the system.

Only glibc reports its use, by `mallinfo2` (since 2.33), and keeps free pages until a call of `malloc_trim`. Both
functions are public; other C libraries lack them.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class HeapUse:
    """The state of the heap of this process."""

    used_bytes: int
    free_bytes: int  # freed, and still the process's, as holes between the bytes in use


class _Mallinfo2(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


def heap_use() -> HeapUse | None:
    """Return the use of the heap over all threads, in about a microsecond; None without glibc 2.33."""
    read = _functions()[0]
    if read is None:
        return None
    found: Any = read()
    return HeapUse(used_bytes=found.uordblks + found.hblkhd, free_bytes=found.fordblks)


def trim_heap() -> bool:
    """Return the free pages of the heap to the system; return False if the C library cannot."""
    trim = _functions()[1]
    if trim is None:
        return False
    trim(0)
    return True


@cache
def _functions() -> tuple[Any, Any]:
    """Return `mallinfo2` and `malloc_trim` of the C library, None for each that it lacks."""
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows has no library of the whole process
        return None, None
    read, trim = getattr(library, "mallinfo2", None), getattr(library, "malloc_trim", None)
    if read is not None:
        read.restype = _Mallinfo2
    if trim is not None:
        trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return read, trim
