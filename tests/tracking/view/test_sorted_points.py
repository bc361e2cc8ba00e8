from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_tracking.view.sorted_points import BLOCK, SortedPoints

FINITE = st.floats(allow_nan=False, allow_infinity=False)


def points_of(values: list[float], *, parts: int = 1) -> SortedPoints:
    points = SortedPoints()
    size = max(1, -(-len(values) // parts))
    for start in range(0, len(values), size):
        part = values[start : start + size]
        steps = list(range(start, start + len(part)))
        points.extend(steps, [float(step) for step in steps], part)
    return points


@given(st.integers(0, 2**32), st.integers(0, 4 * BLOCK), st.integers(0, 4 * BLOCK), st.integers(1, 9))
def test_the_extremes_of_any_range_are_those_of_its_values(
    seed: int, one: int, other: int, parts: int
) -> None:
    # Few distinct values, so that the lowest stands in blocks, before them and behind them at once.
    values = [float((seed * (index + 7) ** 3 >> 5) % 50) for index in range(4 * BLOCK + 1)]
    points = points_of(values, parts=parts)
    start, stop = min(one, other), max(one, other) + 1
    assert points.values[points.lowest(start, stop)] == min(values[start:stop])
    assert points.values[points.highest(start, stop)] == max(values[start:stop])
    assert start <= points.lowest(start, stop) < stop
    assert start <= points.highest(start, stop) < stop
    assert points.total(start, stop) == sum(values[start:stop])


@given(st.lists(FINITE, min_size=1, max_size=40))
def test_any_finite_values_have_extremes(values: list[float]) -> None:
    points = points_of(values)
    assert points.values[points.lowest(0, len(values))] == min(values)
    assert points.values[points.highest(0, len(values))] == max(values)


def test_times_of_a_clock_that_was_set_back_do_not_decrease() -> None:
    points = SortedPoints()
    points.extend([1, 2], [10.0, 8.0], [0.0, 0.0])
    points.extend([3, 4], [9.0, 11.0], [0.0, 0.0])
    assert points.times == array("d", [10.0, 10.0, 10.0, 11.0])


@pytest.mark.parametrize(("position", "index"), [(0, 0), (2, 1), (3, 3), (9, 4)])
def test_the_first_point_at_a_position_is_found(position: int, index: int) -> None:
    points = SortedPoints()
    points.extend([1, 2, 2, 3], [1.0, 2.0, 3.0, 4.0], [0.0] * 4)
    assert points.first_at("step", position) == index
