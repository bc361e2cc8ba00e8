"""Prefetch the next units of a forward or backward, as many as there is room for."""

from collections import deque
from collections.abc import Sequence

from drivetrain_dispatch.offload.residency import Seat, Seats


class Ahead:
    """The units that are requested but not used yet. Callers hold the engine's lock.

    Args:
        units: The seats of each unit.
        seats: All seats of the model.
    """

    __slots__ = ("_asked", "_seats", "_spare", "_units")

    def __init__(self, units: Sequence[Sequence[Seat]], seats: Seats) -> None:
        self._units = units
        self._seats = seats
        self._asked: deque[int] = deque()  # the next ones in the order, without a gap
        self._spare: list[int] = []  # requested too, before other units came in between

    def use(self, unit: int, upcoming: Sequence[int], position: int) -> bool:
        """Take a unit for its use, and return whether it was requested; its claim then passes to the caller.

        Args:
            unit: The index of the unit.
            upcoming: The order of all units.
            position: The position after this unit in the order; requested units that are not near it are given up.
        """
        asked = self._asked
        if asked and asked[0] == unit:
            asked.popleft()
            return True
        if not asked:
            return False
        if found := unit in asked:
            asked.remove(unit)
        near = list(upcoming[position : position + len(asked) + 1])
        for other in asked:
            if other in near:
                near.remove(other)
                self._spare.append(other)
            else:
                self._seats.give_up(self._units[other])
        asked.clear()
        return found

    def ask(self, upcoming: Sequence[int], position: int) -> None:
        """Request the units from a position of an order on, as long as there is room."""
        asked, spare = self._asked, self._spare
        at = position + len(asked)
        while at < len(upcoming):
            unit = upcoming[at]
            if spare and unit in spare:
                spare.remove(unit)
            elif self._seats.fits(self._units[unit]):
                self._seats.claim(self._units[unit])
            else:
                break
            asked.append(unit)
            at += 1
        if spare:
            left, self._spare = spare, []
            for unit in left:
                self._seats.give_up(self._units[unit])

    def make_room(self, seats: Sequence[Seat]) -> None:
        """Give up requested units, the last ones first, until there is room for seats or none is left."""
        while (self._asked or self._spare) and not self._seats.fits(seats):
            last = self._spare.pop() if self._spare else self._asked.pop()
            self._seats.give_up(self._units[last])

    def drop(self, unit: int) -> None:
        """Give up a requested unit, and all units after it."""
        while unit in self._asked:
            self._seats.give_up(self._units[self._asked.pop()])

    def clear(self) -> None:
        """Give up all requested units."""
        left = [*self._asked, *self._spare]
        self._asked.clear()
        self._spare.clear()
        for unit in left:
            self._seats.give_up(self._units[unit])
