"""Pages of mapped files: which are in memory, and bringing them there ahead of their use. Linux alone."""

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable, Iterator
from ctypes import CDLL, c_char, c_int, c_size_t, c_void_p
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

_PAGE_BYTES = mmap.PAGESIZE
_DONTNEED = 4  # madvise: MADV_DONTNEED
_POPULATE_READ = 22  # madvise: MADV_POPULATE_READ, from Linux 5.14 on
_PAGEMAP = "/proc/self/pagemap"
_STEP_BYTES = 8 << 20  # brought in one call: how soon a thread that should stop does


class Pages(NamedTuple):
    """Pages of a mapping, one after the other.

    Attributes:
        first: The address of the first one.
        size_bytes: From there to the end of what is used.
    """

    first: int
    size_bytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Pages":
        """The pages of a contiguous tensor on the host."""
        first = tensor.data_ptr() // _PAGE_BYTES * _PAGE_BYTES
        return cls(first, tensor.data_ptr() + tensor.nbytes - first)

    def steps(self) -> Iterator[tuple[int, int]]:
        """The pages as pieces (address, bytes) that `bring` takes, in their order."""
        for start in range(0, self.size_bytes, _STEP_BYTES):
            yield self.first + start, min(_STEP_BYTES, self.size_bytes - start)


def together(pages: Iterable[Pages]) -> list[Pages]:
    """The same pages in as few pieces as there are. Pure."""
    joined: list[Pages] = []
    for one in sorted(pages):
        end = joined[-1].first + joined[-1].size_bytes if joined else 0
        if joined and one.first <= -(-end // _PAGE_BYTES) * _PAGE_BYTES:
            last = joined.pop()
            joined.append(Pages(last.first, max(end, one.first + one.size_bytes) - last.first))
        elif one.size_bytes:
            joined.append(one)
    return joined


def some_missing(pages: Pages) -> bool:
    """Whether some are not in memory; False where the system does not say."""
    libc = _libc()
    if libc is None:
        return False
    found = bytearray(-(-pages.size_bytes // _PAGE_BYTES))
    where = (c_char * len(found)).from_buffer(found)
    if libc.mincore(pages.first, pages.size_bytes, where) != 0:
        return False
    del where
    return found.count(1) < len(found)


def can_give_back() -> bool:
    """Whether the system says which pages were written to, without which none is given back."""
    return _libc() is not None and os.access(_PAGEMAP, os.R_OK)


def give_back(pages: Pages) -> bool:
    """Take pages of a file out of this process's memory, unless one of them was written to; whether they are out.

    They stay in the system's cache, and come again when they are used. What was written to a private mapping is in
    no file, and would be lost: nobody may begin to write to them meanwhile.
    """
    libc = _libc()
    if libc is None or _some_are_written(pages):
        return False
    return libc.madvise(pages.first, pages.size_bytes, _DONTNEED) == 0


def _some_are_written(pages: Pages) -> bool:
    """Whether some are pages of the process's own; True where the system does not say.

    Of each page, proc_pid_pagemap(5) has 64 bits: 63 whether it is there, 62 whether it was swapped out, 61 whether
    it is a file's.
    """
    entries = bytearray(8 * -(-pages.size_bytes // _PAGE_BYTES))
    if not entries:
        return False
    try:
        with open(_PAGEMAP, "rb", buffering=0) as file:
            file.seek(pages.first // _PAGE_BYTES * 8)
            if file.readinto(entries) != len(entries):
                return True
    except OSError:
        return True
    bits = torch.frombuffer(entries, dtype=torch.int64) >> 61 & 0b111
    return bool(((bits == 0b100) | (bits & 0b010 != 0)).any())


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
