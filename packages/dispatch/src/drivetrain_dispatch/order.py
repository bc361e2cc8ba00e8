"""In which order the parts of a model are used: learnt from the last forward, to know what comes next. Pure."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence


class Order:
    """The order of the last whole forward; before the first one, the model's own.

    Parts are numbers from 0 on. A part may come several times, and a forward may leave parts out.

    Args:
        parts: What to expect before anything was learnt.
    """

    def __init__(self, parts: Sequence[int]) -> None:
        self._parts: tuple[int, ...] = ()
        self._positions: dict[int, list[int]] = {}
        self.learn(parts)

    @property
    def parts(self) -> tuple[int, ...]:
        """The parts in the order in which they are expected."""
        return self._parts

    def learn(self, parts: Sequence[int]) -> None:
        """Take the parts of a forward as what to expect of the next."""
        if not parts or self._parts == tuple(parts):
            return
        positions: defaultdict[int, list[int]] = defaultdict(list)
        for position, part in enumerate(parts):
            positions[part].append(position)
        self._parts, self._positions = tuple(parts), dict(positions)

    def position_after(self, part: int, position: int) -> int:
        """Where a forward is once it uses `part`, having been at `position`: behind the nearest place that fits."""
        if position < len(self._parts) and self._parts[position] == part:
            return position + 1
        places = self._positions.get(part)
        if places is None:
            return position
        nearest = bisect_left(places, position)
        return (places[nearest] if nearest < len(places) else places[0]) + 1

    def ahead(self, position: int, count: int) -> tuple[int, ...]:
        """The next `count` different parts from a position on."""
        return tuple(dict.fromkeys(self._parts[position : position + count]))


class Cursor:
    """How far one thread is in an order.

    Args:
        order: Shared by all threads.
        count: How many parts to look ahead.
    """

    def __init__(self, order: Order, count: int) -> None:
        self._order = order
        self._count = count
        self._position = 0
        self._used: list[int] = []
        self._depth = 0
        self.ahead: tuple[int, ...] = ()

    @property
    def inside(self) -> bool:
        """Whether a forward is under way."""
        return self._depth > 0

    def begin(self) -> None:
        """A forward begins, of the whole model or within another."""
        if self._depth == 0:
            self._position = 0
            self._used = []
            self.ahead = self._order.ahead(0, self._count)
        self._depth += 1

    def use(self, part: int) -> None:
        """A part is used: look what comes after it."""
        if self.inside:
            self._used.append(part)
            self._position = self._order.position_after(part, self._position)
            self.ahead = self._order.ahead(self._position, self._count)

    def end(self, *, whole: bool) -> None:
        """A forward has ended; learnt from if it is the outermost and went to its end."""
        if self._depth == 0:
            return  # a hook before ours failed
        self._depth -= 1
        if self._depth == 0:
            self.ahead = ()
            if whole:
                self._order.learn(self._used)
