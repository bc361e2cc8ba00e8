"""Weights that the host computes with where they are: in the pages of their files, read ahead of the forward."""

import threading
from collections.abc import Collection, Sequence
from functools import partial
from weakref import ref

import psutil
from torch import nn

from drivetrain_dispatch.order import Order, Orders
from drivetrain_dispatch.packed import parts_of
from drivetrain_dispatch.pages import Pages, bring, some_missing, together
from drivetrain_dispatch.units import Unit
from drivetrain_dispatch.weight_files import MappedFile

_NUM_READERS = 2  # one waits for the disk while the other asks
_SHARE_AHEAD = 0.5  # of the host's free memory: pages beyond it would push out others before they were used


class InPlace:
    """Watches a model whose weights are mapped files'.

    At the beginning of each forward the files must be what they were. If some of their pages are not in memory,
    threads read them in the order in which the last such forward used them; its modules are watched for that. Of a
    forward that finds all of them there, nothing is watched: it costs what it costs in memory.

    Args:
        units: In the order in which they are expected; their tensors are the pages of files.
        files: Those.
    """

    def __init__(self, units: Sequence[Unit], files: Collection[MappedFile]) -> None:
        self._modules = [ref(unit.module) for unit in units]  # which hold this
        self._pages = [
            [Pages.of(part) for tensor in unit.tensors.values() for part in parts_of(tensor)]
            for unit in units
        ]
        self._all = together(pages for unit in self._pages for pages in unit)
        self._files = files
        self._orders = Orders(range(len(units)))
        self._own = _Own()
        self._lock = threading.Lock()
        self._reading: _ReadAhead | None = None

    def begin(self, way: str) -> None:
        """The model is used, by its forward or another method.

        Raises:
            WeightFilesError: A file was replaced, written to or deleted.
        """
        for file in self._files:
            file.check_unchanged()
        self._own.depth += 1
        with self._lock:
            if self._own.depth == 1 and self._reading is None and self._some_are_missing():
                room = int(psutil.virtual_memory().available * _SHARE_AHEAD)
                self._reading = self._own.reading = _ReadAhead(
                    [module() for module in self._modules], self._pages, self._orders.of(way), room
                )

    def enter(self, index: int) -> None:
        """Nothing to do: a forward that reads ahead watches by itself."""

    def leave(self, index: int) -> None:
        """Nothing to do: what is used no more, the system may take."""

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
        return any(map(some_missing, self._all))


class _Own(threading.local):
    """What each thread has for itself: in how many forwards it is, and what is read ahead of its own."""

    def __init__(self) -> None:
        self.depth = 0
        self.reading: _ReadAhead | None = None


class _ReadAhead:
    """Threads that bring the pages of one forward, in order, at most so many bytes before it.

    Args:
        modules: Of the units; None for one that is gone.
        units: Their pages.
        order: In which they are expected.
        room_bytes: How far to go before the unit that is used.

    Attributes:
        order: That.
        used: The units that the forward has used.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module | None],
        units: Sequence[Sequence[Pages]],
        order: Order,
        room_bytes: int,
    ) -> None:
        self.order = order
        self.used: list[int] = []
        self._room_bytes = room_bytes
        self._ends: dict[int, int] = {}  # of each unit, the bytes up to its end when it is first used
        self._steps: list[tuple[int, int, int]] = []  # address, bytes, bytes before it
        total = 0
        for index in dict.fromkeys(order.parts):
            for pages in units[index]:
                for address, size_bytes in pages.steps():
                    self._steps.append((address, size_bytes, total))
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
        for number in range(_NUM_READERS):
            threading.Thread(target=self._read, name=f"drivetrain-read-ahead-{number}", daemon=True).start()

    def _reached(self, index: int, _module: nn.Module, _args: object) -> None:
        """The forward uses a unit."""
        self.used.append(index)
        used_bytes = self._ends.get(index, 0)
        if used_bytes > self._used_bytes:
            with self._changed:
                self._used_bytes = used_bytes
                self._changed.notify_all()

    def stop(self) -> None:
        """Read nothing more, and watch nothing; what a thread is reading it still reads."""
        for handle in self._handles:
            handle.remove()
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _read(self) -> None:
        while (step := self._take()) is not None:
            if not bring(*step):
                return  # the forward reads for itself

    def _take(self) -> tuple[int, int] | None:
        """The next piece, once there is room for it."""
        with self._changed:
            while not self._stopped and self._next < len(self._steps):
                address, size_bytes, before = self._steps[self._next]
                if before <= self._used_bytes + self._room_bytes:
                    self._next += 1
                    return address, size_bytes
                self._changed.wait()
        return None
