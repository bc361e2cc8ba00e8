"""Weights that a backward needs again: not kept since the forward, but brought once more, in the opposite order."""

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks

from drivetrain_dispatch.errors import OffloadedError
from drivetrain_dispatch.order import Order
from drivetrain_dispatch.seats import Seat, Seats, version_of


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
        depth: How many units may be on their way beside the one in use.

    Attributes:
        order: Of the units in the last forward.
    """

    def __init__(
        self,
        units: Sequence[Sequence[Seat]],
        seats: Seats,
        lock: threading.RLock,
        *,
        depth: int,
    ) -> None:
        self._units = units
        self._seats = seats
        self.order = Order(())
        self._lock = lock
        self._depth = depth
        self._unit_of: dict[Seat, int] = {}
        for index, unit in enumerate(units):
            for seat in unit:
                self._unit_of.setdefault(seat, index)
        self._claimed: list[int] = []
        self._under_way = False  # whether torch will tell of the end of a backward

    def saving(self) -> AbstractContextManager[None]:
        """Within it autograd saves which weight it needs, not the weight."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def end(self) -> None:
        """No backward goes on: what it has claimed may be changed now, by an optimizer for example."""
        with self._lock:
            self._under_way = False
            if self._claimed:
                self._claim([])

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
            if not self._under_way:
                self._under_way = True
                # As DistributedDataParallel has it: called when this backward is over.
                Variable._execution_engine.queue_callback(self.end)  # pyright: ignore[reportPrivateUsage]
            self._claim([unit, *self._before(unit)])
            value = self._seats.value(saved.seat)
        return value.as_strided(saved.size, saved.stride, saved.offset)

    def _before(self, unit: int) -> list[int]:
        """The units that a backward needs after this one: those that the forward used before it."""
        position = self.order.last_position(unit)
        return [index for index in self.order.before(position, self._depth) if index != unit]

    def _claim(self, units: Sequence[int]) -> None:
        """Claim these units and no others."""
        for index in units:
            if index not in self._claimed:
                self._seats.claim(self._units[index])
        for index in self._claimed:
            if index not in units:
                self._seats.give_up(self._units[index])
        self._claimed = list(units)
