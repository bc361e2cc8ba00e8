"""Query, read ahead and release the pages of mapped files. Linux only."""

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
_STEP_BYTES = 8 << 20  # read in one call; a thread can stop only between two calls


class Pages(NamedTuple):
    """A contiguous range of pages of a mapping."""

    first: int
    size_bytes: int  # the bytes from there to the end of the used part

    @classmethod
    def of(cls, tensor: Tensor) -> "Pages":
        """Return the pages of a contiguous tensor on the host."""
        first = tensor.data_ptr() // _PAGE_BYTES * _PAGE_BYTES
        return cls(first, tensor.data_ptr() + tensor.nbytes - first)

    def steps(self) -> Iterator[tuple[int, int]]:
        """Yield the pages in order, as pieces (address, bytes) for `populate`."""
        for start in range(0, self.size_bytes, _STEP_BYTES):
            yield self.first + start, min(_STEP_BYTES, self.size_bytes - start)


def merge(pages: Iterable[Pages]) -> list[Pages]:
    """Merge ranges of pages that touch or overlap. Pure."""
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
    """Return whether any page is not in memory; False where the system cannot tell."""
    libc = _libc()
    if libc is None:
        return False
    found = bytearray(-(-pages.size_bytes // _PAGE_BYTES))
    where = (c_char * len(found)).from_buffer(found)
    if libc.mincore(pages.first, pages.size_bytes, where) != 0:
        return False
    del where
    return found.count(1) < len(found)


def can_release() -> bool:
    """Return whether the system tells which pages were written to; otherwise no page is released."""
    return _libc() is not None and os.access(_PAGEMAP, os.R_OK)


def release(pages: Pages) -> bool:
    """Release pages of a file from this process's memory, and return whether they were released.

    None is if one was written to: changes to a private mapping are in no file, and would be lost. No thread may begin
    to write to the pages meanwhile. Released pages stay in the page cache, and are mapped again at their next use.
    """
    libc = _libc()
    if libc is None or _some_are_written(pages):
        return False
    return libc.madvise(pages.first, pages.size_bytes, _DONTNEED) == 0


def _some_are_written(pages: Pages) -> bool:
    """Return whether any page is a private copy of the process; True where the system cannot tell.

    proc_pid_pagemap(5) has 64 bits for each page: bit 63 is set if it is present, 62 if it is swapped out, 61 if it
    belongs to a file.
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


def populate(address: int, size_bytes: int) -> bool:
    """Read a piece of a mapping into memory without the GIL; return False where the system cannot."""
    libc = _libc()
    return libc is not None and libc.madvise(address, size_bytes, _POPULATE_READ) == 0


@cache
def _libc() -> CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)  # ctypes releases the GIL, mmap.madvise keeps it
    libc.mincore.argtypes = (c_void_p, c_size_t, c_void_p)
    libc.mincore.restype = c_int
    libc.madvise.argtypes = (c_void_p, c_size_t, c_int)
    libc.madvise.restype = c_int
    return libc
