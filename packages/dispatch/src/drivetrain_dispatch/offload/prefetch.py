"""Request the next units of a forward or backward ahead of their use, as many as there is room for."""

from collections import deque
from collections.abc import Sequence

from drivetrain_dispatch.offload.residency import OffloadedTensor, Residency


class Prefetcher:
    """The units that one run has requested and not used yet. Callers hold the engine's lock."""

    __slots__ = ("_out_of_order", "_requested", "_residency", "_units")

    def __init__(self, units: Sequence[Sequence[OffloadedTensor]], residency: Residency) -> None:
        self._units = units
        self._residency = residency
        self._requested: deque[int] = deque()  # the next ones in the order, without a gap
        self._out_of_order: list[int] = []  # requested too, before an unexpected unit came in between

    def take(self, unit: int, order: Sequence[int], position: int) -> bool:
        """Take a unit for its use, and return whether it was requested; its claim then passes to the caller.

        Requested units that are not near `position`, which follows this unit in the order, are cancelled.
        """
        requested = self._requested
        if requested and requested[0] == unit:
            requested.popleft()
            return True
        if not requested:
            return False
        if found := unit in requested:
            requested.remove(unit)
        near = list(order[position : position + len(requested) + 1])
        for other in requested:
            if other in near:
                near.remove(other)
                self._out_of_order.append(other)
            else:
                self._residency.cancel(self._units[other])
        requested.clear()
        return found

    def request(self, order: Sequence[int], position: int) -> None:
        """Request the units from a position of an order on, as long as there is room."""
        requested, out_of_order = self._requested, self._out_of_order
        next_position = position + len(requested)
        while next_position < len(order):
            unit = order[next_position]
            if out_of_order and unit in out_of_order:
                out_of_order.remove(unit)
            elif self._residency.fits(self._units[unit]):
                self._residency.request(self._units[unit])
            else:
                break
            requested.append(unit)
            next_position += 1
        while out_of_order:
            self._residency.cancel(self._units[out_of_order.pop()])

    def make_room(self, tensors: Sequence[OffloadedTensor]) -> None:
        """Cancel requested units, the last ones first, until there is room for tensors or none is left."""
        while (self._requested or self._out_of_order) and not self._residency.fits(tensors):
            self._cancel_last()

    def cancel_from(self, unit: int) -> None:
        """Cancel a requested unit, and all units after it."""
        while unit in self._requested:
            self._residency.cancel(self._units[self._requested.pop()])

    def cancel_all(self) -> None:
        """Cancel all requested units."""
        while self._requested or self._out_of_order:
            self._cancel_last()

    def _cancel_last(self) -> None:
        last = self._out_of_order.pop() if self._out_of_order else self._requested.pop()
        self._residency.cancel(self._units[last])
