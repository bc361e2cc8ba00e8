"""In which order the parts of a model are used: learnt from the last forward, to know what comes next. Pure."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence


class Order:
    """The order of the last whole forward; before the first one, the model's own.

    Parts are numbers from 0 on. A part may come several times, and a forward may leave parts out.

    Args:
        parts: What to expect before anything was learnt.

    Attributes:
        parts: The parts in the order in which they are expected.
    """

    def __init__(self, parts: Sequence[int]) -> None:
        self._learn(tuple(parts))

    def learn(self, parts: Sequence[int]) -> None:
        """Take the parts of a forward as what to expect of the next."""
        if self.parts != tuple(parts):
            self._learn(tuple(parts))

    def _learn(self, parts: tuple[int, ...]) -> None:
        places: defaultdict[int, list[int]] = defaultdict(list)
        for position, part in enumerate(parts):
            places[part].append(position)
        self.parts, self._places = parts, dict(places)

    def behind(self, part: int, position: int) -> int:
        """Where a forward is that has been at a position and uses a part: behind the nearest one that fits."""
        parts = self.parts
        if position < len(parts) and parts[position] == part:
            return position + 1
        places = self._places.get(part)
        if places is None:
            return min(position, len(parts))
        nearest = bisect_left(places, position)
        return (places[nearest] if nearest < len(places) else places[0]) + 1

    def expects(self, part: int) -> bool:
        """Whether a part is used at all."""
        return part in self._places

    def last_position(self, part: int) -> int:
        """Where a part is used last; behind the end if it is not expected at all."""
        places = self._places.get(part)
        return places[-1] if places else len(self.parts)


class Orders:
    """The order of each way in which a model is used: of its forward, and of its methods that use other parts.

    Args:
        parts: What to expect before anything was learnt.
    """

    def __init__(self, parts: Sequence[int]) -> None:
        self._parts = parts
        self._of: dict[str, Order] = {}

    def of(self, way: str) -> Order:
        """That of one way."""
        return self._of.setdefault(way, Order(self._parts))


class Cursor:
    """How far one thread is in an order, which all threads share.

    Attributes:
        order: That of the outermost forward, or of the last one.
        depth: In how many forwards it is, one within another.
        position: Where the part stands in the order that comes next.
    """

    __slots__ = ("_used", "depth", "order", "position")

    def __init__(self) -> None:
        self.order = Order(())
        self.position = 0
        self._used: list[int] = []
        self.depth = 0

    def begin(self, order: Order) -> None:
        """A forward begins, in such an order; one within another is part of that one's order."""
        if self.depth == 0:
            self.order = order
            self.position = 0
            self._used = []
        self.depth += 1

    def use(self, part: int) -> None:
        """A part is used in a forward: look what comes after it."""
        self._used.append(part)
        self.position = self.order.behind(part, self.position)

    def end(self, *, whole: bool) -> None:
        """A forward has ended; learnt from if it is the outermost and went to its end."""
        self.depth -= 1
        if self.depth == 0 and whole:
            self.order.learn(self._used)
