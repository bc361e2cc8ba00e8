"""Weights that the host computes with where they are: in the pages of their files, read ahead of the forward."""

import threading
from collections.abc import Collection, Sequence

import psutil

from drivetrain_dispatch.order import Order
from drivetrain_dispatch.pages import Pages, bring
from drivetrain_dispatch.weight_files import MappedFile

_NUM_READERS = 2  # one waits for the disk while the other asks
_SHARE_AHEAD = 0.5  # of the host's free memory: pages beyond it would push out others before they were used


class InPlace:
    """Watches a model whose weights are mapped files'.

    At the beginning of each forward the files must be what they were. If some of their pages are not in memory,
    threads read them in the order in which the last forward used them.

    Args:
        units: The pages of each unit, in the order in which they are expected.
        files: That they belong to.
    """

    def __init__(self, units: Sequence[Sequence[Pages]], files: Collection[MappedFile]) -> None:
        self._units = units
        self._files = files
        self._order = Order(range(len(units)))
        self._own = threading.local()  # of each thread, the units that its forward has used
        self._reading: _ReadAhead | None = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        """A forward begins.

        Raises:
            WeightFilesError: A file was replaced, written to or deleted.
        """
        self._own.depth = self._depth() + 1
        for file in self._files:
            file.check_unchanged()
        if self._own.depth == 1:
            self._own.used = []
            self._read_what_is_missing()

    def enter(self, index: int) -> None:
        """A unit is used."""
        if self._depth():
            self._own.used.append(index)
        if (reading := self._reading) is not None:
            reading.reached(index)

    def leave(self, index: int) -> None:
        """Nothing to do: what is used no more, the system may take."""

    def end(self, *, whole: bool) -> None:
        """The forward is over."""
        if self._depth() == 0:
            return  # a hook before ours failed
        self._own.depth -= 1
        if self._own.depth == 0:
            with self._lock:
                reading, self._reading = self._reading, None
            if reading is not None:
                reading.stop()
            if whole and self._own.used:
                self._order.learn(self._own.used)

    def close(self) -> None:
        """Read nothing more."""
        if self._reading is not None:
            self._reading.stop()

    def _read_what_is_missing(self) -> None:
        with self._lock:
            if self._reading is None and any(pages.missing_bytes() for unit in self._units for pages in unit):
                room = int(psutil.virtual_memory().available * _SHARE_AHEAD)
                self._reading = _ReadAhead(self._units, self._order.parts, room)

    def _depth(self) -> int:
        return getattr(self._own, "depth", 0)


class _ReadAhead:
    """Threads that bring the pages of one forward, in order, at most so many bytes before it."""

    def __init__(self, units: Sequence[Sequence[Pages]], order: Sequence[int], room_bytes: int) -> None:
        self._room_bytes = room_bytes
        self._ends: dict[int, int] = {}  # of each unit, the bytes up to its end when it is first used
        self._steps: list[tuple[int, int, int]] = []  # address, bytes, bytes before it
        total = 0
        for index in dict.fromkeys(order):
            for pages in units[index]:
                for address, size_bytes in pages.steps():
                    self._steps.append((address, size_bytes, total))
                    total += size_bytes
            self._ends[index] = total
        self._next = 0
        self._used_bytes = 0
        self._changed = threading.Condition()
        self._stopped = False
        for number in range(_NUM_READERS):
            threading.Thread(target=self._read, name=f"drivetrain-read-ahead-{number}", daemon=True).start()

    def reached(self, index: int) -> None:
        """The forward uses a unit."""
        used_bytes = self._ends.get(index, 0)
        if used_bytes > self._used_bytes:
            with self._changed:
                self._used_bytes = used_bytes
                self._changed.notify_all()

    def stop(self) -> None:
        """Read nothing more; what a thread is reading it still reads."""
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
