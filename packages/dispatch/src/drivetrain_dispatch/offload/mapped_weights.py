"""Weights that the host computes with where they are: in the pages of their files."""

import threading
import time
from collections.abc import Mapping, Sequence
from weakref import ref

from drivetrain_dispatch.errors import DeviceMapError
from drivetrain_dispatch.files.weight_files import MappedFile
from drivetrain_dispatch.model.units import Unit
from drivetrain_dispatch.offload.execution_order import Orders
from drivetrain_dispatch.offload.page_reader import Bounds, Reading, Stretch
from drivetrain_dispatch.offload.pages import can_give_back, some_missing, together
from drivetrain_dispatch.planning.memory_budget import free_of_host

_SHARE_AHEAD = 0.5  # of the host's free memory: pages beyond it would push out others before they were used
_SHARE_USED = 0.8  # what a model may take of it; a larger one comes and goes
_SHARE_KEPT = 0.65  # of it, at most, by what stays of such a model
_SHARE_FILLED = 0.9  # of it, by what stays, what is brought ahead, and the unit in use
_SHARE_CHECKING = 0.02  # the most time, of all, that goes into asking the system which pages are there
_MOST_AHEAD_BYTES = 128 << 20  # where pages are given back: as much as a disk needs to be always at work


def check_release(release_pages: object) -> None:
    """Check that it is a switch, and that the system can do it.

    Raises:
        ValueError: It is none.
        DeviceMapError: The system cannot.
    """
    if not isinstance(release_pages, bool):
        raise ValueError(f"release_pages={release_pages!r}: give True or False")
    if release_pages and not can_give_back():
        raise DeviceMapError(
            "release_pages=True: this system does not say which pages were written to (Linux does, in "
            "/proc/self/pagemap), so that none can be given back without loss: leave it out"
        )


class InPlace:
    """Watches a model whose weights are mapped files'.

    At the beginning of each forward the files must be what they were. If some of their pages are not in memory,
    threads read them in the order in which the last such forward used them; its modules are watched for that. Of a
    forward that finds all of them there, nothing is watched: it costs what it costs in memory.

    Where the host has no room for all of them, by its own memory or by the limit of a container, a part stays and the
    others are given back behind the forward, so that none is pushed out before it was used.

    Args:
        units: In the order in which they are expected; their tensors are the pages of files.
        files: The file of each tensor, by its name.
        releases: Whether pages always are given back, and none of them stays.
    """

    def __init__(self, units: Sequence[Unit], files: Mapping[str, MappedFile], *, releases: bool) -> None:
        self._modules = [ref(unit.module) for unit in units]  # which hold this
        self._units = [
            [
                stretch
                for name, tensor in unit.tensors.items()
                for stretch in Stretch.each_of(tensor, files[name])
            ]
            for unit in units
        ]
        self._all = together(stretch.pages for unit in self._units for stretch in unit)
        self._size_bytes = sum(pages.size_bytes for pages in self._all)
        self._largest_bytes = max(
            (sum(stretch.pages.size_bytes for stretch in unit) for unit in self._units), default=0
        )
        self._files = list(dict.fromkeys(files[name] for unit in units for name in unit.tensors))
        self._releases = releases
        self._next_check = 0.0
        self._orders = Orders(range(len(units)))
        self._own = _Own()
        self._lock = threading.Lock()
        self._reading: Reading | None = None

    def begin(self, way: str) -> None:
        """The model is used, by its forward or another method.

        Raises:
            WeightFilesError: A file was replaced, written to or deleted.
        """
        for file in self._files:
            file.check_unchanged()
        self._own.depth += 1
        with self._lock:
            if self._own.depth == 1 and self._reading is None:
                missing = self._some_are_missing()
                if missing or self._releases:
                    modules = [module() for module in self._modules]
                    self._reading = self._own.reading = Reading(
                        modules, self._units, self._orders.of(way), self._bounds(), brings=missing
                    )

    def enter(self, index: int) -> None:
        """Nothing to do: a forward that reads ahead watches by itself."""

    def leave(self, index: int) -> None:
        """Nothing to do: as before."""

    def end(self, *, whole: bool) -> None:
        """The forward is over."""
        own = self._own
        own.depth -= 1
        if own.depth == 0 and own.reading is not None:
            own.reading.stop()
            with self._lock:
                if whole:
                    own.reading.order.learn(own.reading.used)
                self._reading = own.reading = None

    def busy(self) -> bool:
        """Whether some thread reads ahead for a forward."""
        return self._reading is not None

    def close(self) -> None:
        """Read nothing more."""
        with self._lock:
            if self._reading is not None:
                self._reading.stop()

    def _some_are_missing(self) -> bool:
        """Whether pages are known to be missing.

        The system takes about 10 ms for a gigabyte of which little is used, as of experts. Once it has found all
        pages in memory, it is asked again when that time is a small share of what has passed.
        """
        start = time.perf_counter()
        if start < self._next_check:
            return False
        missing = any(map(some_missing, self._all))
        took = time.perf_counter() - start
        self._next_check = 0.0 if missing else start + took / _SHARE_CHECKING
        return missing

    def _bounds(self) -> Bounds:
        """How much of the files is in memory during a forward."""
        room = free_of_host()
        ahead_bytes = min(int(room * _SHARE_AHEAD / 2), _MOST_AHEAD_BYTES)
        if self._size_bytes > room * _SHARE_USED:
            beside = ahead_bytes + self._largest_bytes
            kept_bytes = int(min(room * _SHARE_KEPT, max(0, room * _SHARE_FILLED - beside)))
            return Bounds(ahead_bytes, 0 if self._releases else kept_bytes, leaves_cache=True)
        return Bounds(ahead_bytes, 0) if self._releases else Bounds(int(room * _SHARE_AHEAD))


class _Own(threading.local):
    """What each thread has for itself: in how many forwards it is, and what is read ahead of its own."""

    def __init__(self) -> None:
        self.depth = 0
        self.reading: Reading | None = None
