"""Weights that a backward needs again: not kept since the forward, but brought once more.

In the order of the last backward, if the forwards before both used the model in the same order; else in the opposite
order of the forward. What is computed again (`torch.utils.checkpoint`) is known from the last backward alone.
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
from drivetrain_dispatch.offload.execution_order import Cursor, Order
from drivetrain_dispatch.offload.prefetch import Ahead
from drivetrain_dispatch.offload.residency import Seat, Seats, version_of


class _Weight(NamedTuple):
    """A view of a weight that autograd has saved; by its version, changes since then are told."""

    seat: Seat
    version: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Activation(NamedTuple):
    """Another tensor that autograd has saved; torch leaves its check for changes to whoever keeps it."""

    tensor: Tensor
    version: int


class Backward:
    """Brings what autograd saved of the seats.

    Args:
        units: The seats of each unit.
        seats: All of them.
        lock: Held while seats are claimed.

    Attributes:
        ahead: What was asked for before its turn.
        order: Of the units in the last forward.
    """

    def __init__(
        self,
        units: Sequence[Sequence[Seat]],
        seats: Seats,
        lock: threading.RLock,
    ) -> None:
        self._units = units
        self._seats = seats
        self.order = Order(())
        self._lock = lock
        self._unit_of: dict[Seat, int] = {}
        for index, unit in enumerate(units):
            for seat in unit:
                self._unit_of.setdefault(seat, index)
        self.ahead = Ahead(units, seats)
        self._current: int | None = None  # the unit that is claimed for its use
        self._learnt = Order(())  # of the units in a backward
        self._opposite: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # an order, and the other way
        self._learnt_after: tuple[int, ...] | None = None  # the order of the forward before it
        self._cursor = Cursor()  # in a backward of whose end torch will tell
        self._last: int | None = None  # what it has used

    def saving(self) -> AbstractContextManager[None]:
        """Within it autograd saves which weight it needs, not the weight."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def is_under_way(self) -> bool:
        """Whether this thread is in a backward; what is claimed is given up if it is not."""
        try:
            self._await_end()
        except RuntimeError:  # torch takes no callback elsewhere
            self.end()
            return False
        return True

    def drop_stale(self, unit: int) -> None:
        """Give up what is claimed of a unit if it has changed: an optimizer may step within the backward."""
        stale = [seat.asked_version != version_of(seat.tensor) for seat in self._units[unit] if seat.arrival]
        if any(stale):
            self.ahead.drop(unit)
            if self._current == unit:
                self._current = None
                self._give_up(unit)

    def use(self, unit: int, *, again: bool) -> None:
        """A backward uses a unit: claim it with those that follow and find room, and no others.

        Args:
            unit: Its index.
            again: Whether its forward is computed again.
        """
        cursor, learnt = self._cursor, self._learnt
        if cursor.depth == 0:
            cursor.begin(learnt)
        if unit == self._last == self._current:
            return  # autograd saves each weight for itself
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
        """No backward goes on: what it has claimed may be changed now, by an optimizer for example.

        Args:
            whole: Whether it went to its end; it is learnt from then.
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
        """As DistributedDataParallel has it: torch calls when this backward is over."""
        engine = Variable._execution_engine  # pyright: ignore[reportPrivateUsage]
        engine.queue_callback(partial(self.end, whole=True))

    def _pack(self, tensor: Tensor) -> _Activation | _Weight:
        with self._lock:
            seat = self._seats.in_use(tensor)
        if seat is None:
            # Autograd puts its own graph back; with the tensor's, an output would hold itself for ever.
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
        """What a backward needs after a unit: what the forward used before it, as an order and a position in it."""
        parts = self.order.parts
        if self._opposite[0] is not parts:
            self._opposite = (parts, parts[::-1])
        return self._opposite[1], len(parts) - self.order.last_position(unit)

    def _claim(self, unit: int, upcoming: Sequence[int], position: int) -> None:
        """Claim a unit that is used, in place of the one before."""
        before, self._current = self._current, None
        asked, seats = self.ahead.use(unit, upcoming, position), self._units[unit]
        try:
            if asked or before == unit:
                before = before if asked else None  # that claim goes on
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
