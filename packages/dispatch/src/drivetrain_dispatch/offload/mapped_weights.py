"""Compute on the host with weights in place, in the mapped pages of their files."""

import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from weakref import ref

from drivetrain_dispatch.errors import DeviceMapError
from drivetrain_dispatch.model.model_layout import Unit
from drivetrain_dispatch.model.quantized_tensor import parts_of
from drivetrain_dispatch.offload.execution_order import ExecutionOrder
from drivetrain_dispatch.offload.pages import (
    MappedPart,
    PageLimits,
    PageReader,
    Pages,
    can_release,
    merge,
    some_missing,
)
from drivetrain_dispatch.planning.memory_budget import free_of_host
from drivetrain_weights import MappedFile

_FREE_SHARE_AHEAD = 0.5  # of the host's free memory, read ahead: more would evict pages before their use
_FREE_SHARE_USED = 0.8  # of free memory; pages of a model that takes more are released behind the forward
_FREE_SHARE_KEPT = 0.65  # of free memory: the most pages of such a model that stay
_FREE_SHARE_FILLED = 0.9  # of free memory, for pages that stay, pages read ahead and the unit in use
_TIME_SHARE_CHECKING = 0.02  # the largest share of time spent on asking the system which pages are in memory
_MOST_AHEAD_BYTES = 128 << 20  # of read-ahead where pages are released: enough to keep a disk busy


def check_release(release_pages: object) -> None:
    """Check that `release_pages` is a bool, and True only if the system can release pages."""
    if not isinstance(release_pages, bool):
        raise ValueError(f"release_pages={release_pages!r}: give True or False")
    if release_pages and not can_release():
        raise DeviceMapError(
            "release_pages=True: this system does not say which pages were written to (Linux does, in "
            "/proc/self/pagemap), so that none can be given back without loss: leave it out"
        )


class MappedWeightsEngine:
    """The engine of a model that uses weights in place, in mapped files, which must stay unchanged.

    If some pages are not in memory at the beginning of a forward, threads read them in the order of the last such
    forward, and hooks on the modules track its position. Otherwise the forward costs the same as with weights in
    memory. Where the host or its container has no room for all pages, some pages stay and the others are released
    behind the forward, so that no page is evicted before its use. With `releases` no page stays.
    """

    def __init__(self, units: Sequence[Unit], files: Mapping[str, MappedFile], *, releases: bool) -> None:
        self._modules = [ref(unit.module) for unit in units]  # weak, as the modules hold this engine
        self._units = [
            [
                MappedPart(Pages.of(part), files[name], ref(tensor) if part is tensor else None)
                for name, tensor in unit.tensors.items()
                for part in parts_of(tensor)
            ]
            for unit in units
        ]
        self._all = merge(part.pages for unit in self._units for part in unit)
        self._size_bytes = sum(pages.size_bytes for pages in self._all)
        self._largest_bytes = max(
            (sum(part.pages.size_bytes for part in unit) for unit in self._units), default=0
        )
        self._files = list(dict.fromkeys(files[name] for unit in units for name in unit.tensors))
        self._releases = releases
        self._next_check = 0.0
        self._orders = defaultdict[str, ExecutionOrder](partial(ExecutionOrder, range(len(units))))
        self._thread = _ThreadState()
        self._lock = threading.Lock()
        self._reader: PageReader | None = None

    def begin(self, method: str) -> None:
        """Begin a use of the model, by its forward or another method; its files must be unchanged."""
        for file in self._files:
            file.check_unchanged()
        self._thread.depth += 1
        with self._lock:
            if self._thread.depth == 1 and self._reader is None:
                missing = self._some_are_missing()
                if missing or self._releases:
                    modules = [module() for module in self._modules]
                    self._reader = self._thread.reader = PageReader(
                        modules, self._units, self._orders[method], self._limits(), reads=missing
                    )

    def end(self, *, completed: bool) -> None:
        """End a use of the model, and learn its order if it did not fail (`completed`)."""
        thread = self._thread
        thread.depth -= 1
        if thread.depth == 0 and thread.reader is not None:
            thread.reader.stop()
            with self._lock:
                if completed:
                    thread.reader.order.learn(thread.reader.used)
                self._reader = thread.reader = None

    def is_busy(self) -> bool:
        """Return whether any thread reads ahead for a forward."""
        return self._reader is not None

    def close(self) -> None:
        """Stop reading ahead."""
        with self._lock:
            if self._reader is not None:
                self._reader.stop()

    def _some_are_missing(self) -> bool:
        """Return whether some pages of the weights are not in memory, as far as the system tells."""
        # The system call takes about 10 ms per gigabyte. Once it has found all pages in memory, it is repeated only
        # when that is a small share of the time since.
        start = time.perf_counter()
        if start < self._next_check:
            return False
        missing = any(map(some_missing, self._all))
        took = time.perf_counter() - start
        self._next_check = 0.0 if missing else start + took / _TIME_SHARE_CHECKING
        return missing

    def _limits(self) -> PageLimits:
        """Return how much of the files a forward may hold in memory."""
        room = free_of_host()
        ahead_bytes = min(int(room * _FREE_SHARE_AHEAD / 2), _MOST_AHEAD_BYTES)
        if self._size_bytes > room * _FREE_SHARE_USED:
            beside = ahead_bytes + self._largest_bytes
            kept_bytes = int(min(room * _FREE_SHARE_KEPT, max(0, room * _FREE_SHARE_FILLED - beside)))
            return PageLimits(ahead_bytes, 0 if self._releases else kept_bytes, leaves_cache=True)
        return PageLimits(ahead_bytes, 0) if self._releases else PageLimits(int(room * _FREE_SHARE_AHEAD))


class _ThreadState(threading.local):
    """The state of each thread: the number of nested forwards it is in, and the read-ahead for them."""

    def __init__(self) -> None:
        self.depth = 0
        self.reader: PageReader | None = None
