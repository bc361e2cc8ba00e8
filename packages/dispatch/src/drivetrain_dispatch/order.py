"""In which order the parts of a model are used: learnt from the last forward, to know what comes next. Pure."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple


class Step(NamedTuple):
    """One use of a part.

    Attributes:
        part: Which one.
        position: Behind it.
        ahead: The different ones of the next parts.
    """

    part: int
    position: int
    ahead: tuple[int, ...]


class Order:
    """The order of the last whole forward; before the first one, the model's own.

    Parts are numbers from 0 on. A part may come several times, and a forward may leave parts out.

    Args:
        parts: What to expect before anything was learnt.
        num_ahead: How many parts to look ahead.

    Attributes:
        parts: The parts in the order in which they are expected.
        first: What comes at the beginning.
    """

    def __init__(self, parts: Sequence[int], num_ahead: int = 0) -> None:
        self._num_ahead = num_ahead
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
        self.first = self._ahead(0)
        self._steps = [
            Step(part, position, self._ahead(position)) for position, part in enumerate(parts, start=1)
        ]

    def _ahead(self, position: int) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.parts[position : position + self._num_ahead]))

    def step(self, part: int, position: int) -> Step:
        """The use of `part` by a forward that has been at `position`: the nearest one that fits."""
        steps = self._steps
        if position < len(steps) and (step := steps[position]).part == part:
            return step
        places = self._places.get(part)
        if places is None:
            position = min(position, len(steps))
            return Step(part, position, self._ahead(position))
        nearest = bisect_left(places, position)
        return steps[places[nearest] if nearest < len(places) else places[0]]

    def expects(self, part: int) -> bool:
        """Whether a part is used at all."""
        return part in self._places

    def last_position(self, part: int) -> int:
        """Where a part is used last; behind the end if it is not expected at all."""
        places = self._places.get(part)
        return places[-1] if places else len(self.parts)

    def before(self, position: int, count: int) -> list[int]:
        """The different ones of the parts before a position, the nearest first."""
        return list(dict.fromkeys(reversed(self.parts[max(0, position - count) : position])))


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
        order: That of the outermost forward, or of the last one.
        depth: In how many forwards it is, one within another.
        ahead: The parts that come next; none outside a forward.
    """

    __slots__ = ("_position", "_used", "ahead", "depth", "order")

    def __init__(self) -> None:
        self.order = Order(())
        self._position = 0
        self._used: list[int] = []
        self.depth = 0
        self.ahead: tuple[int, ...] = ()

    def begin(self, order: Order) -> None:
        """A forward begins, in such an order; one within another is part of that one's order."""
        if self.depth == 0:
            self.order = order
            self._position = 0
            self._used = []
            self.ahead = self.order.first
        self.depth += 1

    def use(self, part: int) -> None:
        """A part is used in a forward: look what comes after it."""
        self._used.append(part)
        _, self._position, self.ahead = self.order.step(part, self._position)

    def end(self, *, whole: bool) -> None:
        """A forward has ended; learnt from if it is the outermost and went to its end."""
        self.depth -= 1
        if self.depth == 0:
            self.ahead = ()
            if whole:
                self.order.learn(self._used)
