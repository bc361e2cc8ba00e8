"""Read the pages of mapped files ahead of a forward, and release them behind it. Linux only."""

import ctypes
import mmap
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from ctypes import CDLL, c_char, c_int, c_size_t, c_void_p
from functools import cache, partial
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from drivetrain_dispatch.offload.execution_order import ExecutionOrder
from drivetrain_weights import MappedFile

_PAGE_BYTES = mmap.PAGESIZE
_DONTNEED = 4  # madvise: MADV_DONTNEED
_POPULATE_READ = 22  # madvise: MADV_POPULATE_READ, from Linux 5.14 on
_PAGEMAP = "/proc/self/pagemap"
_STEP_BYTES = 8 << 20  # read in one call; a thread can stop only between two calls
_FOLIO_BYTES = 2 << 20  # the largest folio of the page cache
_NUM_READERS = 2  # one waits for the disk while the other requests the next piece


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
    """Release pages of a file to the page cache unless a page was written to; return whether they were released.

    No thread may begin to write to the pages meanwhile.
    """
    libc = _libc()  # changes to a private mapping are in no file, and would be lost
    if libc is None or _some_are_written(pages):
        return False
    return libc.madvise(pages.first, pages.size_bytes, _DONTNEED) == 0


def _some_are_written(pages: Pages) -> bool:
    """Return whether any page is a private copy of the process; True where the system cannot tell."""
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
    # Of each page's 64 bits, proc_pid_pagemap(5): 63 is set if it is present, 62 if swapped out, 61 if in a file.
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


class MappedPart(NamedTuple):
    """The pages of a tensor, or of one part of a quantized tensor."""

    pages: Pages
    file: MappedFile
    tensor: ref[Tensor] | None  # A weak reference to the tensor; None if it is quantized

    def is_used(self) -> bool:
        """Return whether the tensor still has its values in these pages, and was not converted or moved."""
        if self.tensor is None:
            return True
        tensor = self.tensor()
        return tensor is not None and Pages.of(tensor) == self.pages


class PageLimits(NamedTuple):
    """The limits on the pages that a forward holds in memory."""

    ahead_bytes: int
    # The bytes that stay in memory after their use, those used first; None for all.
    kept_bytes: int | None = None
    # Whether released pages leave the page cache too, where they would evict the pages used next.
    leaves_cache: bool = False


class PageReader:
    """The threads that read a forward's missing pages in order; used pages are released behind the forward."""

    def __init__(
        self,
        modules: Sequence[nn.Module | None],
        units: Sequence[Sequence[MappedPart]],
        order: ExecutionOrder,
        limits: PageLimits,
        *,
        reads: bool,
    ) -> None:
        self.order = order
        self.used: list[int] = []
        self._units = units
        self._limits = limits
        self._uses_left = Counter(order.units)
        self._ends: dict[int, int] = {}  # of each unit, the bytes to read up to its end
        self._steps: list[_Step] = []
        total = 0
        for index in dict.fromkeys(order.units):
            for part in units[index]:
                for address, size_bytes in part.pages.steps() if part.is_used() else ():
                    self._steps.append(_Step(address, size_bytes, before_bytes=total, unit=index))
                    total += size_bytes
            self._ends[index] = total
        self._next = 0
        self._used_bytes = 0
        self._changed = threading.Condition()
        self._stopped = False
        self._handles = [
            module.register_forward_pre_hook(partial(self._reached, index))
            for index, module in enumerate(modules)
            if module is not None
        ]
        self._threads = [
            threading.Thread(target=self._read, name=f"drivetrain-read-ahead-{number}", daemon=True)
            for number in range(_NUM_READERS if reads else 0)
        ]
        for thread in self._threads:
            thread.start()

    def _reached(self, index: int, _module: nn.Module, _args: object) -> None:
        """Record that the forward uses a unit: read on, and release the unit before."""
        previous = self.used[-1] if self.used else index
        self.used.append(index)
        self._uses_left[index] -= 1
        used_bytes = self._ends.get(index, 0)
        if used_bytes > self._used_bytes:
            with self._changed:
                self._used_bytes = used_bytes
                self._changed.notify_all()
        if self._is_done(previous):
            self._release(previous)

    def stop(self) -> None:
        """Stop reading, remove the hooks, and release the remaining pages."""
        for handle in self._handles:
            handle.remove()
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._limits.kept_bytes is not None:
            for thread in self._threads:
                thread.join()  # pages that it reads after the release would stay
            for index in range(len(self._units)):
                self._release(index)

    def _release(self, index: int) -> None:
        kept_bytes = self._limits.kept_bytes
        if kept_bytes is None or self._ends.get(index, kept_bytes + 1) <= kept_bytes:
            return
        for part in self._units[index]:
            if part.is_used() and release(part.pages) and self._limits.leaves_cache:
                # A folio of the page cache may begin in the part before, which is not used any more either.
                part.file.forget(part.pages.first - _FOLIO_BYTES, part.pages.size_bytes + _FOLIO_BYTES)

    def _is_done(self, index: int) -> bool:
        """Return whether the forward has left a unit that it does not use again."""
        return bool(self.used) and self.used[-1] != index and self._uses_left[index] <= 0

    def _read(self) -> None:
        """Read the pieces in order; before each piece, wait until there is room."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._stopped
                        or self._next == len(self._steps)
                        or self._steps[self._next].before_bytes <= self._used_bytes + self._limits.ahead_bytes
                    )
                )
                if self._stopped or self._next == len(self._steps):
                    return
                step = self._steps[self._next]
                self._next += 1
                if self._is_done(step.unit):  # a reader that fell behind must not read what was released
                    continue
            if not populate(step.address, step.size_bytes):
                return  # the forward reads the rest by page faults


class _Step(NamedTuple):
    """A piece that is read at once."""

    address: int
    size_bytes: int
    before_bytes: int  # the bytes of all pieces before it
    unit: int
