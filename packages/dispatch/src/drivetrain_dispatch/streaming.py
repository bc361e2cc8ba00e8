"""Weights that come while others compute: each unit of a model is brought before its turn and leaves after it."""

import threading
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from time import perf_counter

import torch
from torch import Tensor

from drivetrain_dispatch.backward import Backward
from drivetrain_dispatch.order import Cursor, Orders
from drivetrain_dispatch.seats import Seat, Seats
from drivetrain_dispatch.trace import OffloadTrace, Turn
from drivetrain_dispatch.weight_files import MappedFile


class Streaming:
    """Brings the units of a model, in its forward and in its backward.

    Threads may share a model: a weight stays while one of them uses it. A lock is held while a unit is waited for.
    Between forwards nothing is kept or on its way, since what is stored may be changed then; what a backward that
    failed has claimed goes when the next forward begins.

    Args:
        units: The seats of each unit, in the order in which they are expected.
        depth: How many units may be on their way beside those in use.
        files: That some of them are the pages of.
        names: Of the units, for a trace.

    Attributes:
        stats: What was brought.
        trace: What is written into at each use of a unit; None for no trace.
    """

    def __init__(
        self,
        units: Sequence[Sequence[Seat]],
        *,
        names: Sequence[str],
        depth: int,
        files: Collection[MappedFile] = (),
    ) -> None:
        self.trace: OffloadTrace | None = None
        self._names = names
        self._units = units
        self._files = files
        self._orders = Orders(range(len(units)), depth)
        self._lock = threading.RLock()
        self._threads = _Threads()  # before the seats, which ask whether a thread is inside
        self._seats = Seats({seat: None for unit in units for seat in unit}, self)
        self.stats = self._seats.stats
        self._backward = Backward(units, self._seats, self._lock, depth=depth)
        self._forwards: list[Cursor] = []  # of the threads that are in one
        self._expected: set[int] = set()  # units that a thread will use next

    def begin(self, way: str) -> None:
        """The whole model is used, by its forward or another method.

        Raises:
            WeightFilesError: A file was replaced, written to or deleted.
        """
        for file in self._files:
            file.check_unchanged()
        own = self._threads.own
        own.saving.append(ExitStack())
        with self._lock:
            own.cursor.begin(self._orders.of(way))
            self._forwards.append(own.cursor)
            self._backward.end()
            self._backward.order = own.cursor.order
        try:
            if torch.is_grad_enabled():
                own.saving[-1].enter_context(self._backward.saving())
            with self._lock:
                self._look_ahead()
        except BaseException:
            self.end(whole=False)
            raise

    def end(self, *, whole: bool) -> None:
        """It is over; `whole` if nothing failed."""
        own = self._threads.own
        own.saving.pop().close()
        with self._lock:
            own.cursor.end(whole=whole)
            self._forwards.remove(own.cursor)
            self._leave_views(own)
            self._look_ahead()

    def enter(self, index: int) -> None:
        """A unit is used: bring it, and begin to bring those that follow."""
        own, trace = self._threads.own, self.trace
        start = perf_counter() if trace is not None else 0.0
        with self._lock:
            if own.cursor.depth:
                own.cursor.use(index)
                self._take(self._units[index], index)
            else:
                again = self._backward.is_under_way()
                if again:
                    self._backward.drop_stale(index)
                self._take(self._units[index], index, again=again)
            own.num_inside += 1
        if trace is not None:
            own.turns.append((start, perf_counter()))

    def leave(self, index: int) -> None:
        """It is used no more: it goes, unless it is expected again."""
        own = self._threads.own
        if self.trace is not None and own.turns:
            self._write_down(self.trace, index, own.turns.pop())
        with self._lock:
            own.num_inside -= 1
            self._seats.release(self._units[index])
            if own.viewed:
                self._leave_views(own)

    def inside(self) -> bool:
        """Whether this thread computes with the model."""
        return self._threads.own.inside()

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Bring single tensors that no unit in use has brought, or lend those that one has."""
        with self._lock:
            seats = self._seats.of_tensors(tensors)
            self._take(seats)
            return [seat.shown for seat in seats if seat.shown is not None]

    def stays(self, tensor: Tensor) -> bool:
        """Whether a tensor is computed by the device that stores it: only its dtype is another one, if any."""
        (seat,) = self._seats.of_tensors([tensor])
        return seat.parcel.device == seat.parcel.home.device

    def let_go(self, tensors: Sequence[Tensor], result: object) -> None:
        """That is over; of what the result is a view, what is written to it is awaited until the forward ends."""
        with self._lock:
            seats = self._seats.of_tensors(tensors)
            viewed = [
                seat for seat in seats if isinstance(result, Tensor) and self._seats.in_use(result) is seat
            ]
            self._threads.own.viewed.extend(viewed)
            self._seats.release([seat for seat in seats if seat not in viewed])

    def busy(self) -> bool:
        """Whether some thread computes with the model."""
        return bool(self._forwards) or self._seats.some_in_use()

    def close(self) -> None:
        """Make every tensor an ordinary one again, its values those that are stored."""
        with self._lock:
            self._backward.end()
            self._seats.close()

    def _take(self, seats: Sequence[Seat], index: int | None = None, *, again: bool = False) -> None:
        """Put tensors in place; what comes next is asked for before they are waited for.

        Args:
            seats: The tensors'.
            index: The unit that they are.
            again: Whether a backward computes it once more.
        """
        stats = self.stats
        stats.num_used += 1
        if index in self._expected:
            self._expected.remove(index)  # its claim is this use's from now on
        elif self._seats.claim(seats):
            stats.num_missed += 1
        try:
            self._look_ahead()
            if again and index is not None:
                self._backward.use(index, again=True)
        except BaseException:
            self._seats.give_up(seats)
            raise
        self._seats.put(seats)

    def _leave_views(self, own: "_Own") -> None:
        """Once this thread is in no forward, what its operations have viewed is written to no more."""
        if own.viewed and not own.inside():
            viewed, own.viewed = own.viewed, []
            self._seats.release(viewed)

    def _look_ahead(self) -> None:
        """Ask for what the threads will use next, and give up what they will not."""
        expected, forwards = self._expected, self._forwards
        if len(forwards) == 1:
            wanted = forwards[0].ahead
        else:
            wanted = tuple({index: None for cursor in forwards for index in cursor.ahead})
        for index in wanted:
            if index not in expected:
                self._seats.claim(self._units[index])
                expected.add(index)
        if len(expected) > len(wanted):
            for index in tuple(expected):
                if index not in wanted:
                    expected.discard(index)
                    self._seats.give_up(self._units[index])

    def _write_down(self, trace: OffloadTrace, index: int, waited: tuple[float, float]) -> None:
        arrival = self._units[index][0].arrival
        came = waited if arrival is None else arrival.times()
        trace.turns.append(Turn(self._names[index], came, waited, (waited[1], perf_counter())))


class _Own:
    """What a thread has for itself: how far it is, how many units it is in, and what its forwards save."""

    __slots__ = ("cursor", "num_inside", "saving", "turns", "viewed")

    def __init__(self) -> None:
        self.cursor = Cursor()
        self.num_inside = 0
        self.saving: list[ExitStack] = []
        self.viewed: list[Seat] = []  # of which the forward has views
        self.turns: list[tuple[float, float]] = []  # of the units it is in, when they were waited for

    def inside(self) -> bool:
        """Whether it computes with the model."""
        return self.num_inside > 0 or self.cursor.depth > 0


class _Threads(threading.local):
    """Of each thread, its own; looked up once at each use of a unit."""

    def __init__(self) -> None:
        self.own = _Own()
