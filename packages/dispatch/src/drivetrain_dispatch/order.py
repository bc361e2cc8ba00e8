"""In which order the parts of a model are used: learnt from the last forward, to know what comes next. Pure."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence


class Order:
    """The order of the last whole forward; before the first one, the model's own.

    Parts are numbers from 0 on. A part may come several times, and a forward may leave parts out.

    Args:
        parts: What to expect before anything was learnt.
        num_ahead: How many parts to look ahead.
    """

    def __init__(self, parts: Sequence[int], num_ahead: int = 0) -> None:
        self._num_ahead = num_ahead
        self._parts: tuple[int, ...] | None = None
        self._positions: dict[int, list[int]] = {}
        self._ahead: list[tuple[int, ...]] = []
        self.learn(parts)

    @property
    def parts(self) -> tuple[int, ...]:
        """The parts in the order in which they are expected."""
        return self._parts or ()

    def learn(self, parts: Sequence[int]) -> None:
        """Take the parts of a forward as what to expect of the next."""
        if self._parts == tuple(parts):
            return
        positions: defaultdict[int, list[int]] = defaultdict(list)
        for position, part in enumerate(parts):
            positions[part].append(position)
        self._parts, self._positions = tuple(parts), dict(positions)
        self._ahead = [
            tuple(dict.fromkeys(parts[position : position + self._num_ahead]))
            for position in range(len(parts) + 1)
        ]

    def position_after(self, part: int, position: int) -> int:
        """Where a forward is once it uses `part`, having been at `position`: behind the nearest place that fits."""
        parts = self.parts
        if position < len(parts) and parts[position] == part:
            return position + 1
        places = self._positions.get(part)
        if places is None:
            return min(position, len(parts))
        nearest = bisect_left(places, position)
        return (places[nearest] if nearest < len(places) else places[0]) + 1

    def last_position(self, part: int) -> int:
        """Where a part is used last; behind the end if it is not expected at all."""
        places = self._positions.get(part)
        return places[-1] if places else len(self.parts)

    def before(self, position: int, count: int) -> list[int]:
        """The different ones of the parts before a position, the nearest first."""
        return list(dict.fromkeys(reversed(self.parts[max(0, position - count) : position])))

    def ahead(self, position: int) -> tuple[int, ...]:
        """The different ones of the next parts from a position on."""
        ahead = self._ahead
        return ahead[min(position, len(ahead) - 1)]


class Orders:
    """The order of each way in which a model is used: of its forward, and of its methods that use other parts.

    Args:
        parts: What to expect before anything was learnt.
        num_ahead: How many parts to look ahead.
    """

    def __init__(self, parts: Sequence[int], num_ahead: int = 0) -> None:
        self._parts = parts
        self._num_ahead = num_ahead
        self._of: dict[str, Order] = {}

    def of(self, way: str) -> Order:
        """That of one way."""
        return self._of.setdefault(way, Order(self._parts, self._num_ahead))


class Cursor:
    """How far one thread is in an order, which all threads share.

    Attributes:
        ahead: The parts that come next; none outside a forward.
    """

    def __init__(self) -> None:
        self._order = Order(())
        self._position = 0
        self._used: list[int] = []
        self._depth = 0
        self.ahead: tuple[int, ...] = ()

    @property
    def inside(self) -> bool:
        """Whether a forward is under way."""
        return self._depth > 0

    @property
    def order(self) -> Order:
        """The order of the outermost forward, or of the last one."""
        return self._order

    def begin(self, order: Order) -> None:
        """A forward begins, in such an order; one within another is part of that one's order."""
        if self._depth == 0:
            self._order = order
            self._position = 0
            self._used = []
            self.ahead = self._order.ahead(0)
        self._depth += 1

    def use(self, part: int) -> None:
        """A part is used: look what comes after it."""
        if self._depth:
            self._used.append(part)
            self._position = self._order.position_after(part, self._position)
            self.ahead = self._order.ahead(self._position)

    def end(self, *, whole: bool) -> None:
        """A forward has ended; learnt from if it is the outermost and went to its end."""
        self._depth -= 1
        if self._depth == 0:
            self.ahead = ()
            if whole:
                self._order.learn(self._used)
