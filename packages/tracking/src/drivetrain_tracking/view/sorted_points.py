"""Points in the order of their steps, with the lowest and highest value of each block of points.

The lowest of 10,000 neighbours is found in 40 blocks and two ends: a query over 10 million points takes milliseconds
with Python's own arrays.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Literal

BLOCK = 256

Axis = Literal["step", "time"]


class SortedPoints:
    """Points whose steps and times never decrease, 24 bytes each. Not thread-safe."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.times = array("d")
        self.values = array("d")
        self._lows = array("d")  # of each whole block
        self._highs = array("d")
        self._sums = array("d")

    def __len__(self) -> int:
        return len(self.values)

    def positions(self, axis: Axis) -> "array[int] | array[float]":
        """Return the steps or the times."""
        return self.steps if axis == "step" else self.times

    def first_at(self, axis: Axis, position: float) -> int:
        """Return the index of the first point at or after a position."""
        return bisect_left(self.positions(axis), position)

    def extend(self, steps: Sequence[int], times: Sequence[float], values: Sequence[float]) -> None:
        """Append points after the last point; their steps never decrease, and their values are finite."""
        self.steps.extend(steps)
        # Where a clock was set back, a time becomes equal to the one before.
        last = self.times[-1] if self.times else times[0]
        if times[0] < last or sorted(times) != times:
            times = list(accumulate(times, max, initial=last))[1:]
        self.times.extend(times)
        self.values.extend(values)
        for start in range(len(self._lows) * BLOCK, len(self.values) - BLOCK + 1, BLOCK):
            block = self.values[start : start + BLOCK]
            self._lows.append(min(block))
            self._highs.append(max(block))
            self._sums.append(sum(block))

    def lowest(self, start: int, stop: int) -> int:
        """Return the index of a lowest value in a non-empty range."""
        return self._extreme(min, self._lows, start, stop)

    def highest(self, start: int, stop: int) -> int:
        """Return the index of a highest value in a non-empty range."""
        return self._extreme(max, self._highs, start, stop)

    def total(self, start: int, stop: int) -> float:
        """Return the sum of the values of a range; the sum may be infinite."""
        first, last = -(-start // BLOCK), stop // BLOCK
        if first >= last:
            return sum(self.values[start:stop])
        inner = sum(self._sums[first:last])
        return sum(self.values[start : first * BLOCK]) + inner + sum(self.values[last * BLOCK : stop])

    def _extreme(
        self, best_of: Callable[["array[float]"], float], blocks: "array[float]", start: int, stop: int
    ) -> int:
        """Return the index of the lowest or highest value, with the help of each block's lowest or highest."""
        first, last = -(-start // BLOCK), stop // BLOCK
        if first >= last:
            return self.values.index(best_of(self.values[start:stop]), start, stop)
        before, behind = self.values[start : first * BLOCK], self.values[last * BLOCK : stop]
        best = best_of(blocks[first:last])
        found = best_of(before + behind + array("d", [best]))
        if found in before:
            return start + before.index(found)
        if found in behind:
            return last * BLOCK + behind.index(found)
        block = (first + blocks[first:last].index(found)) * BLOCK
        return self.values.index(found, block, block + BLOCK)
