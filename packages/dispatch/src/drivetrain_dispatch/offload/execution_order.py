"""The order in which a model uses its parts, learnt from the last forward to predict the next. Pure."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence


class ExecutionOrder:
    """The order of the last complete forward; before the first one, the model's own order.

    Parts are indices from 0 on. A part may occur several times, and a forward may skip parts.

    Args:
        parts: The order to expect of the first forward.

    Attributes:
        parts: The parts in their expected order.
    """

    def __init__(self, parts: Sequence[int]) -> None:
        self._learn(tuple(parts))

    def learn(self, parts: Sequence[int]) -> None:
        """Learn the order of a forward, to expect it of the next one."""
        if self.parts != tuple(parts):
            self._learn(tuple(parts))

    def _learn(self, parts: tuple[int, ...]) -> None:
        places: defaultdict[int, list[int]] = defaultdict(list)
        for position, part in enumerate(parts):
            places[part].append(position)
        self.parts, self._places = parts, dict(places)

    def behind(self, part: int, position: int) -> int:
        """Return the position that follows when a forward at `position` uses `part`.

        It is behind the part's next occurrence, or else behind its first one; an unknown part keeps the position.
        """
        parts = self.parts
        if position < len(parts) and parts[position] == part:
            return position + 1
        places = self._places.get(part)
        if places is None:
            return min(position, len(parts))
        nearest = bisect_left(places, position)
        return (places[nearest] if nearest < len(places) else places[0]) + 1

    def expects(self, part: int) -> bool:
        """Return whether the order contains a part."""
        return part in self._places

    def last_position(self, part: int) -> int:
        """Return the position of a part's last use; the length of the order if it lacks the part."""
        places = self._places.get(part)
        return places[-1] if places else len(self.parts)


class ExecutionOrders:
    """The order of each way to use a model: its forward, and its methods that use other parts.

    Args:
        parts: The order to expect of the first use.
    """

    def __init__(self, parts: Sequence[int]) -> None:
        self._parts = parts
        self._of: dict[str, ExecutionOrder] = {}

    def of(self, way: str) -> ExecutionOrder:
        """Return the order of a method, by its name."""
        return self._of.setdefault(way, ExecutionOrder(self._parts))


class Cursor:
    """The position of one thread in an order that all threads share.

    Attributes:
        order: The order of the outermost running forward, or of the last one.
        depth: The number of nested forwards that the thread is in.
        position: The position in the order of the next part.
    """

    __slots__ = ("_used", "depth", "order", "position")

    def __init__(self) -> None:
        self.order = ExecutionOrder(())
        self.position = 0
        self._used: list[int] = []
        self.depth = 0

    def begin(self, order: ExecutionOrder) -> None:
        """Begin a forward in an order; a nested forward counts as part of the outer one's order."""
        if self.depth == 0:
            self.order = order
            self.position = 0
            self._used = []
        self.depth += 1

    def use(self, part: int) -> None:
        """Record the use of a part, and move to the position after it."""
        self._used.append(part)
        self.position = self.order.behind(part, self.position)

    def end(self, *, whole: bool) -> None:
        """End a forward, and learn its order if it is the outermost one and completed (`whole`)."""
        self.depth -= 1
        if self.depth == 0 and whole:
            self.order.learn(self._used)
