"""Overlap transfers with computation: fetch each unit of a model before its turn, and release it after."""

import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from time import perf_counter

import torch
from torch import Tensor

from drivetrain_dispatch.offload.execution_order import Cursor, ExecutionOrders
from drivetrain_dispatch.offload.prefetch import Ahead
from drivetrain_dispatch.offload.residency import Seat, Seats
from drivetrain_dispatch.offload.saved_tensors import Backward
from drivetrain_dispatch.offload.trace import OffloadTrace, UnitUse
from drivetrain_weights import MappedFile


class Streaming:
    """The engine that fetches the units of a model in its forward and backward.

    Weights on a device or in transfer to it stay within the device's window; a unit in use is fetched whatever its
    size. Threads may share a model: a weight stays on the device while any of them uses it. A thread that waits for a
    unit holds the lock. Between forwards nothing is kept or in transfer, since stored weights may change then; the
    next forward gives up the claims of a backward that failed.

    Args:
        units: The seats of each unit, in the expected order of use.
        names: The names of the units, for a trace.
        window_bytes: The most bytes of fetched weights that each device may hold at once.
        files: The files that some of the weights are mapped from.

    Attributes:
        stats: The counts of uses, misses and fetched bytes.
        trace: The trace that records each use of a unit; None for no trace.
    """

    def __init__(
        self,
        units: Sequence[Sequence[Seat]],
        *,
        names: Sequence[str],
        window_bytes: Mapping[torch.device, int],
        files: Collection[MappedFile] = (),
    ) -> None:
        self.trace: OffloadTrace | None = None
        self._names = names
        self._units = units
        self._files = files
        self._orders = ExecutionOrders(range(len(units)))
        self._lock = threading.RLock()
        self._threads = _Threads()  # created before the seats, whose tensors call `inside`
        self._seats = Seats({seat: None for unit in units for seat in unit}, self, window_bytes=window_bytes)
        self.stats = self._seats.stats
        self._backward = Backward(units, self._seats, self._lock)
        self._forwards: list[_Own] = []  # the threads that run one, once for each

    def begin(self, way: str) -> None:
        """Begin a use of the whole model, by its forward or another method.

        Raises:
            WeightFilesError: A file was replaced, written to or deleted.
        """
        for file in self._files:
            file.check_unchanged()
        own = self._threads.own
        own.saving.append(ExitStack())
        with self._lock:
            own.cursor.begin(self._orders.of(way))
            if own.cursor.depth == 1:
                own.ahead = Ahead(self._units, self._seats)
            self._forwards.append(own)
            self._backward.end()
            self._backward.order = own.cursor.order
        try:
            if torch.is_grad_enabled():
                own.saving[-1].enter_context(self._backward.saving())
            with self._lock:
                _look_ahead(own)
        except BaseException:
            self.end(whole=False)
            raise

    def end(self, *, whole: bool) -> None:
        """End a use of the whole model; `whole` is True if nothing failed."""
        own = self._threads.own
        own.saving.pop().close()
        with self._lock:
            own.cursor.end(whole=whole)
            self._forwards.remove(own)
            self._leave_views(own)
            if own.cursor.depth == 0 and own.ahead is not None:
                own.ahead.clear()

    def enter(self, index: int) -> None:
        """Put a unit in place for its use, and prefetch the units that follow."""
        own, trace = self._threads.own, self.trace
        start = perf_counter() if trace is not None else 0.0
        with self._lock:
            if own.cursor.depth:
                self._take_expected(own, index)
            elif self._backward.is_under_way():
                self._take_again(index)
            else:
                self._take(self._units[index])
            own.num_inside += 1
        if trace is not None:
            own.turns.append((start, perf_counter()))

    def leave(self, index: int) -> None:
        """Release a unit after its use, unless it is expected again."""
        own = self._threads.own
        if self.trace is not None and own.turns:
            self._write_down(self.trace, index, own.turns.pop())
        with self._lock:
            own.num_inside -= 1
            self._seats.release(self._units[index])
            if own.viewed:
                self._leave_views(own)
            if own.cursor.depth:
                _look_ahead(own)

    def inside(self) -> bool:
        """Return whether this thread computes with the model."""
        return self._threads.own.inside()

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Fetch tensors that no active unit holds; reuse the copies of those that one does."""
        with self._lock:
            seats = self._seats.of_tensors(tensors)
            self._take(seats)
            return [seat.shown for seat in seats if seat.shown is not None]

    def stays(self, tensor: Tensor) -> bool:
        """Return whether the device that stores a tensor also computes with it; its dtype may still differ."""
        (seat,) = self._seats.of_tensors([tensor])
        return seat.parcel.device == seat.parcel.home.device

    def let_go(self, tensors: Sequence[Tensor], result: object) -> None:
        """Release fetched tensors after an operation.

        Those that the result is a view of stay until the forward ends, as the view may still be written to.
        """
        with self._lock:
            seats = self._seats.of_tensors(tensors)
            viewed = [
                seat for seat in seats if isinstance(result, Tensor) and self._seats.in_use(result) is seat
            ]
            self._threads.own.viewed.extend(viewed)
            self._seats.release([seat for seat in seats if seat not in viewed])

    def busy(self) -> bool:
        """Return whether any thread computes with the model."""
        return bool(self._forwards) or self._seats.some_in_use()

    def close(self) -> None:
        """Make every tensor an ordinary one again, with the stored values."""
        with self._lock:
            self._backward.end()
            self._seats.close()

    def _take_expected(self, own: "_Own", index: int) -> None:
        """Put a unit of a forward in place; request the next ones before waiting for it."""
        cursor, seats = own.cursor, self._units[index]
        cursor.use(index)
        assert own.ahead is not None
        if own.ahead.use(index, cursor.order.parts, cursor.position):
            self.stats.num_used += 1
        else:
            self._claim_now(seats)
        try:
            _look_ahead(own)
        except BaseException:
            self._seats.give_up(seats)
            raise
        self._seats.put(seats)

    def _take_again(self, index: int) -> None:
        """Put a unit in place that a backward recomputes."""
        seats = self._units[index]
        self._backward.drop_stale(index)
        self._claim_now(seats)
        try:
            self._backward.use(index, again=True)
        except BaseException:
            self._seats.give_up(seats)
            raise
        self._seats.put(seats)

    def _take(self, seats: Sequence[Seat]) -> None:
        """Put tensors in place that were not expected."""
        self._claim_now(seats)
        self._seats.put(seats)

    def _claim_now(self, seats: Sequence[Seat]) -> None:
        """Claim seats for immediate use; prefetched units make room for them, the last ones first."""
        self.stats.num_used += 1
        behind = False
        if not self._seats.fits(seats):
            for own in self._forwards:
                if own.ahead is not None:
                    own.ahead.make_room(seats)
            self._backward.ahead.make_room(seats)
            behind = self._seats.wait_for_room(seats)
        if self._seats.claim(seats) and not behind:
            self.stats.num_missed += 1

    def _leave_views(self, own: "_Own") -> None:
        """Release viewed weights once this thread is in no forward: nothing writes to the views any more."""
        if own.viewed and not own.inside():
            viewed, own.viewed = own.viewed, []
            self._seats.release(viewed)

    def _write_down(self, trace: OffloadTrace, index: int, waited: tuple[float, float]) -> None:
        arrival = self._units[index][0].arrival
        came = waited if arrival is None else arrival.times()
        trace.turns.append(UnitUse(self._names[index], came, waited, (waited[1], perf_counter())))


class _Own:
    """The state of one thread: its position, the number of units it is in, its forwards' saved-tensor hooks."""

    __slots__ = ("ahead", "cursor", "num_inside", "saving", "turns", "viewed")

    def __init__(self) -> None:
        self.cursor = Cursor()
        self.ahead: Ahead | None = None  # for the running forward, or the last one
        self.num_inside = 0
        self.saving: list[ExitStack] = []
        self.viewed: list[Seat] = []  # seats that the forward has views of
        self.turns: list[tuple[float, float]] = []  # when each unit that it is in was waited for

    def inside(self) -> bool:
        """Return whether the thread computes with the model."""
        return self.num_inside > 0 or self.cursor.depth > 0


class _Threads(threading.local):
    """The state of the current thread; looked up once at each use of a unit."""

    def __init__(self) -> None:
        self.own = _Own()


def _look_ahead(own: _Own) -> None:
    """Request the units that a thread's forward uses next."""
    if own.ahead is not None:
        own.ahead.ask(own.cursor.order.parts, own.cursor.position)
