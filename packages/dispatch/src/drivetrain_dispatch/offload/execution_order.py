"""The order in which a model uses its units, learnt from the last run to predict the next. Pure."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence


class ExecutionOrder:
    """The order of unit indices in the last complete run, or in the model. A unit may occur several times."""

    def __init__(self, units: Sequence[int] = ()) -> None:
        self._set(tuple(units))

    def learn(self, units: Sequence[int]) -> None:
        """Learn the order of a run, and expect the same order in the next run."""
        if self.units != tuple(units):
            self._set(tuple(units))

    def _set(self, units: tuple[int, ...]) -> None:
        positions: defaultdict[int, list[int]] = defaultdict(list)
        for position, unit in enumerate(units):
            positions[unit].append(position)
        self.units, self.reversed_units = units, units[::-1]
        self._positions = dict(positions)

    def position_after(self, unit: int, position: int) -> int:
        """Return the position after a unit's next use, else after its first use; an unknown unit keeps `position`."""
        units = self.units
        if position < len(units) and units[position] == unit:
            return position + 1
        positions = self._positions.get(unit)
        if positions is None:
            return min(position, len(units))
        nearest = bisect_left(positions, position)
        return (positions[nearest] if nearest < len(positions) else positions[0]) + 1

    def expects(self, unit: int) -> bool:
        """Return whether the order contains a unit."""
        return unit in self._positions

    def last_position(self, unit: int) -> int:
        """Return the position of a unit's last use; for an unknown unit, the length of the order."""
        positions = self._positions.get(unit)
        return positions[-1] if positions else len(self.units)


class OrderRecorder:
    """The units that a run has used, and its position in an order that all threads share."""

    __slots__ = ("depth", "order", "position", "used")

    def __init__(self) -> None:
        self.order = ExecutionOrder()  # the order of the outermost run that goes on, or of the last one
        self.position = 0
        self.used: list[int] = []
        self.depth = 0  # the number of nested runs; 0 while none goes on

    def begin(self, order: ExecutionOrder) -> None:
        """Begin a run that is expected in an order; a nested run counts as part of the outer run."""
        if self.depth == 0:
            self.order = order
            self.position = 0
            self.used = []
        self.depth += 1

    def use(self, unit: int) -> None:
        """Record the use of a unit, and move to the position after it."""
        self.used.append(unit)
        self.position = self.order.position_after(unit, self.position)

    def end(self, *, completed: bool) -> None:
        """End a run, and learn its order if it is the outermost one and completed."""
        self.depth -= 1
        if self.depth == 0 and completed:
            self.order.learn(self.used)


class BackwardOrder:
    """The expected order of a backward: the last backward's after such a forward, else the forward's reversed."""

    def __init__(self) -> None:
        self.forward = ExecutionOrder()
        self._recorder = OrderRecorder()
        self._learnt = ExecutionOrder()
        # The order of the forward before the learnt backward.
        self._learnt_after: tuple[int, ...] | None = None

    @property
    def is_running(self) -> bool:
        """True from the first use in a backward to its end."""
        return self._recorder.depth > 0

    def use(self, unit: int, *, recomputed: bool) -> tuple[Sequence[int], int]:
        """Record the use of a unit; return an order, and the position in the order of the next expected units."""
        recorder = self._recorder
        if not self.is_running:
            recorder.begin(self._learnt)
        # Autograd asks for each weight of a unit by itself.
        if not recorder.used or recorder.used[-1] != unit:
            recorder.use(unit)
        if self._learnt_after is self.forward.units and self._learnt.expects(unit):
            return self._learnt.units, recorder.position
        if recomputed:  # by torch.utils.checkpoint: only the last backward predicts its order
            return (), 0
        return self.forward.reversed_units, len(self.forward.units) - self.forward.last_position(unit)

    def end(self, *, completed: bool) -> None:
        """End the backward, and learn its order if it completed."""
        if self.is_running:
            self._recorder.end(completed=completed)
            if completed:
                self._learnt_after = self.forward.units
