"""Reduce points to those that a picture can show: the lowest and highest value of each column of pixels. Pure."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite

from drivetrain_tracking.view.sorted_points import Axis, SortedPoints


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The part of an axis that a picture shows."""

    axis: Axis
    low: float
    high: float
    num_columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducedPoints:
    """Some of the points of a window, in their order, and means for smoothing."""

    xs: Sequence[float]
    ys: Sequence[float]
    mean_xs: Sequence[float]  # those of the points if all are shown, else the middles of pixel columns
    means: Sequence[float]
    num_points: int


def column_edges(window: Window) -> list[float]:
    """Return the start of each column of pixels, and the end of the last column: one number more than columns."""
    width = (window.high - window.low) / window.num_columns
    inner = [window.low + width * column for column in range(1, window.num_columns)]
    # Rounding must not carry an inner edge past the end.
    return [window.low, *(min(max(edge, window.low), window.high) for edge in inner), window.high]


def _filled_columns(
    xs: "array[int] | array[float]", window: Window, first: int, last: int
) -> Iterator[tuple[float, int, int]]:
    """Yield the middle of each column of pixels that holds points, and the indices of its first and next points."""
    edges = column_edges(window)
    bounds = [first, *(bisect_left(xs, edge, first, last) for edge in edges[1:-1]), last]
    for (left, right), (begin, until) in zip(pairwise(edges), pairwise(bounds), strict=True):
        if begin < until:
            yield (left + right) / 2, begin, until


def reduce_points(
    points: SortedPoints, window: Window, start: int = 0, stop: int | None = None
) -> ReducedPoints:
    """Return the points that a picture of a window needs.

    These are all points if columns hold at most two on average, else the lowest and highest of each column. The
    points next to the window on both sides are included, so that the line leaves the picture where it should.
    """
    xs = points.positions(window.axis)
    end = len(xs) if stop is None else stop
    first = bisect_left(xs, window.low, start, end)
    last = bisect_right(xs, window.high, first, end)
    before = [first - 1] if first > start else []
    behind = [last] if last < end else []
    if last - first <= 2 * window.num_columns:
        shown = [*before, *range(first, last), *behind]
        positions = [float(xs[index]) for index in shown]
        values = [points.values[index] for index in shown]
        return ReducedPoints(
            xs=positions, ys=values, mean_xs=positions, means=values, num_points=last - first
        )
    shown = before
    mean_xs: list[float] = []
    means: list[float] = []
    for column_middle, begin, until in _filled_columns(xs, window, first, last):
        lowest, highest = points.lowest(begin, until), points.highest(begin, until)
        shown += sorted({lowest, highest})
        mean_xs.append(column_middle)
        mean = points.total(begin, until) / (until - begin)
        # The sum of values near the largest float is none; the middle of the two ends is a number always.
        middle = points.values[lowest] / 2 + points.values[highest] / 2
        means.append(mean if isfinite(mean) else middle)
    shown += behind
    return ReducedPoints(
        xs=[float(xs[index]) for index in shown],
        ys=[points.values[index] for index in shown],
        mean_xs=mean_xs,
        means=means,
        num_points=last - first,
    )


def marked_columns(points: SortedPoints, window: Window) -> list[float]:
    """Return one position for each column of pixels that holds any point."""
    xs = points.positions(window.axis)
    first = bisect_left(xs, window.low)
    last = bisect_right(xs, window.high, first)
    if last - first <= window.num_columns:
        return sorted({float(xs[index]) for index in range(first, last)})
    return [float(xs[begin]) for _, begin, _ in _filled_columns(xs, window, first, last)]
