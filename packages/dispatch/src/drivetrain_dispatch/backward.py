"""Weights that a backward needs again: not kept since the forward, but brought once more, in the opposite order."""

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from drivetrain_dispatch.errors import OffloadedError
from drivetrain_dispatch.order import Order
from drivetrain_dispatch.seats import Seat, Seats


class _Saved(NamedTuple):
    """A weight, or a view of one, that autograd has saved; by its version, changes since then are told."""

    seat: Seat
    version: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Backward:
    """Brings what autograd saved of the seats, and takes gradients to where parameters are stored.

    Args:
        units: The seats of each unit.
        seats: All of them.
        order: Of the units in a forward.
        lock: Held while seats are claimed.
        depth: How many units may be on their way beside the one in use.
    """

    def __init__(
        self,
        units: Sequence[Sequence[Seat]],
        seats: Seats,
        order: Order,
        lock: threading.RLock,
        *,
        depth: int,
    ) -> None:
        self._units = units
        self._seats = seats
        self._order = order
        self._lock = lock
        self._depth = depth
        self._unit_of: dict[Seat, int] = {}
        for index, unit in enumerate(units):
            for seat in unit:
                self._unit_of.setdefault(seat, index)
        self._claimed: list[int] = []
        self._handles = [handle for seat in self._unit_of for handle in _store_gradient(seat)]

    def saving(self) -> AbstractContextManager[None]:
        """Within it autograd saves which weight it needs, not the weight."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def end(self) -> None:
        """No backward goes on: what it has claimed may be changed now, by an optimizer for example."""
        self._claim([])

    def close(self) -> None:
        """Forget everything."""
        self.end()
        for handle in self._handles:
            handle.remove()

    def _pack(self, tensor: Tensor) -> "Tensor | _Saved":
        with self._lock:
            seat = self._seats.in_use(tensor)
        if seat is None:
            # Autograd puts its own graph back; with the tensor's, an output would hold itself for ever.
            return tensor.detach()
        version = seat.tensor._version  # pyright: ignore[reportPrivateUsage] it has no other name
        return _Saved(seat, version, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, saved: "Tensor | _Saved") -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if saved.seat.tensor._version != saved.version:  # pyright: ignore[reportPrivateUsage]
            raise OffloadedError(
                f"a weight of shape {list(saved.seat.tensor.shape)} was changed after the forward and before its "
                "backward: call backward() before optimizer.step(), or run the forward again"
            )
        unit = self._unit_of[saved.seat]
        with self._lock:
            self._claim([unit, *self._before(unit)])
            value = self._seats.value(saved.seat)
        return value.as_strided(saved.size, saved.stride, saved.offset)

    def _before(self, unit: int) -> list[int]:
        """The units that a backward needs after this one: those that the forward used before it."""
        position = self._order.last_position(unit)
        return [index for index in self._order.before(position, self._depth) if index != unit]

    def _claim(self, units: Sequence[int]) -> None:
        """Claim these units and no others."""
        for index in units:
            if index not in self._claimed:
                self._seats.claim(self._units[index])
        for index in self._claimed:
            if index not in units:
                self._seats.give_up(self._units[index])
        self._claimed = list(units)


def _store_gradient(seat: Seat) -> list[RemovableHandle]:
    """Have the gradient of a parameter go to where the parameter is stored, and be added up there."""
    parameter, home = seat.tensor, seat.parcel.home
    if not isinstance(parameter, nn.Parameter) or not parameter.requires_grad:
        return []
    stored: list[Tensor] = []

    def hide(_gradient: Tensor) -> None:
        # Autograd would add the new gradient to the stored one: on another device, or in another dtype.
        stored.clear()
        if parameter.grad is not None:
            stored.append(parameter.grad)
            parameter.grad = None

    def store(_parameter: Tensor) -> None:
        if parameter.grad is not None:
            gradient = parameter.grad.to(home.device, home.dtype)
            parameter.grad = stored.pop().add_(gradient) if stored else gradient

    return [parameter.register_hook(hide), parameter.register_post_accumulate_grad_hook(store)]
