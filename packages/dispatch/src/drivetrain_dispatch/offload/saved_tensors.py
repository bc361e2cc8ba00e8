"""Fetch weights again for the backward, instead of keeping them from the forward.

The expected order is that of the last backward, if the forwards before both used the model in the same order; else
the reverse order of the forward. Recomputation (`torch.utils.checkpoint`) is predicted from the last backward only.
"""

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks

from drivetrain_dispatch.errors import OffloadedError
from drivetrain_dispatch.offload.execution_order import Cursor, ExecutionOrder
from drivetrain_dispatch.offload.prefetch import Ahead
from drivetrain_dispatch.offload.residency import Seat, Seats, version_of


class _Weight(NamedTuple):
    """A view of a weight that autograd has saved; its version shows later changes."""

    seat: Seat
    version: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Activation(NamedTuple):
    """A saved tensor that is no weight; with saved-tensor hooks, torch does not check it for changes itself."""

    tensor: Tensor
    version: int


class Backward:
    """A fetcher of the weights that autograd has saved for the backward.

    Args:
        units: The seats of each unit.
        seats: All seats of the model.
        lock: The engine's lock, held while seats are claimed.

    Attributes:
        ahead: The units that were prefetched for the backward.
        order: The order of the units in the last forward.
    """

    def __init__(
        self,
        units: Sequence[Sequence[Seat]],
        seats: Seats,
        lock: threading.RLock,
    ) -> None:
        self._units = units
        self._seats = seats
        self.order = ExecutionOrder(())
        self._lock = lock
        self._unit_of: dict[Seat, int] = {}
        for index, unit in enumerate(units):
            for seat in unit:
                self._unit_of.setdefault(seat, index)
        self.ahead = Ahead(units, seats)
        self._current: int | None = None  # the unit that is claimed for its use
        self._learnt = ExecutionOrder(())  # the order of the units in the last backward
        self._opposite: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # an order and its reverse
        self._learnt_after: tuple[int, ...] | None = None  # the order of the forward before that backward
        self._cursor = Cursor()  # in a backward whose end torch reports by a callback
        self._last: int | None = None  # the last unit that it has used

    def saving(self) -> AbstractContextManager[None]:
        """Run the block with hooks by which autograd saves references to weights, not the weights."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def is_under_way(self) -> bool:
        """Return whether this thread is in a backward; if not, give up what the last one has claimed."""
        try:
            self._await_end()
        except RuntimeError:  # torch accepts callbacks only in a backward
            self.end()
            return False
        return True

    def drop_stale(self, unit: int) -> None:
        """Give up the claims on a unit that has changed: an optimizer may step within the backward."""
        stale = [seat.asked_version != version_of(seat.tensor) for seat in self._units[unit] if seat.arrival]
        if any(stale):
            self.ahead.drop(unit)
            if self._current == unit:
                self._current = None
                self._give_up(unit)

    def use(self, unit: int, *, again: bool) -> None:
        """Claim a unit that a backward uses and the next ones that there is room for, and no others.

        Args:
            unit: The index of the unit.
            again: Whether the unit's forward is recomputed.
        """
        cursor, learnt = self._cursor, self._learnt
        if cursor.depth == 0:
            cursor.begin(learnt)
        if unit == self._last == self._current:
            return  # autograd unpacks each weight of a unit by itself
        if unit != self._last:
            self._last = unit
            cursor.use(unit)
        if self._learnt_after is self.order.parts and learnt.expects(unit):
            upcoming, position = learnt.parts, cursor.position
        else:
            upcoming, position = ((), 0) if again else self._before(unit)
        self._claim(unit, upcoming, position)
        self.ahead.ask(upcoming, position)

    def end(self, *, whole: bool = False) -> None:
        """End the backward and give up its claims, as an optimizer may change the weights now.

        Args:
            whole: Whether the backward completed; its order is learnt then.
        """
        with self._lock:
            if self._cursor.depth:
                self._cursor.end(whole=whole)
                self._last = None
                if whole:
                    self._learnt_after = self.order.parts
            current, self._current = self._current, None
            self._give_up(current)
            self.ahead.clear()

    def _await_end(self) -> None:
        """Have torch call `end` when this backward is over, in the way of DistributedDataParallel."""
        engine = Variable._execution_engine  # pyright: ignore[reportPrivateUsage]
        engine.queue_callback(partial(self.end, whole=True))

    def _pack(self, tensor: Tensor) -> _Activation | _Weight:
        with self._lock:
            seat = self._seats.in_use(tensor)
        if seat is None:
            # Autograd restores the graph itself; an output that is saved with its graph would hold itself forever.
            return _Activation(tensor.detach(), version_of(tensor))
        version = version_of(seat.tensor)
        return _Weight(seat, version, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, saved: _Activation | _Weight) -> Tensor:
        if isinstance(saved, _Activation):
            if version_of(saved.tensor) != saved.version:
                raise OffloadedError(
                    f"a tensor of shape {list(saved.tensor.shape)} that the backward needs was changed in place "
                    "after the forward used it: write x = x * 2 instead of x *= 2 there"
                )
            return saved.tensor
        if version_of(saved.seat.tensor) != saved.version:
            raise OffloadedError(
                f"a weight of shape {list(saved.seat.tensor.shape)} was changed after the forward and before its "
                "backward: call backward() before optimizer.step(), or run the forward again"
            )
        unit = self._unit_of[saved.seat]
        with self._lock:
            if self._cursor.depth == 0:
                self._await_end()
            self.use(unit, again=False)
            value = self._seats.value(saved.seat)
        return value.as_strided(saved.size, saved.stride, saved.offset)

    def _before(self, unit: int) -> tuple[tuple[int, ...], int]:
        """Return the reverse order of the forward, and the position in it after a unit."""
        parts = self.order.parts
        if self._opposite[0] is not parts:
            self._opposite = (parts, parts[::-1])
        return self._opposite[1], len(parts) - self.order.last_position(unit)

    def _claim(self, unit: int, upcoming: Sequence[int], position: int) -> None:
        """Claim a unit that is used, in place of the previous one."""
        before, self._current = self._current, None
        asked, seats = self.ahead.use(unit, upcoming, position), self._units[unit]
        try:
            if asked or before == unit:
                before = before if asked else None  # else the previous claim, on the same unit, continues
            elif not self._seats.fits(seats):
                self._give_up(before)
                before = None
                self.ahead.make_room(seats)
                self._seats.wait_for_room(seats)
                self._seats.claim(seats)
            else:
                self._seats.claim(seats)
            self._current = unit
        finally:
            self._give_up(before)

    def _give_up(self, unit: int | None) -> None:
        if unit is not None:
            self._seats.give_up(self._units[unit])
