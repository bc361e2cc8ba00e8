from bisect import bisect_left, bisect_right
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_tracking.view.downsampling import Window, column_edges, marked_columns, reduce_points
from drivetrain_tracking.view.sorted_points import SortedPoints

FINITE = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def filled(draw: st.DrawFn) -> SortedPoints:
    size = draw(st.integers(1, 600))
    seed = draw(st.integers(1, 2**31))
    gaps = draw(st.sampled_from([0, 1, 3, 1000]))  # many points at one step; steps far apart
    steps: list[int] = []
    at = draw(st.integers(-1000, 1000))
    for index in range(size):
        at += (seed >> (index % 20)) % (gaps + 1)
        steps.append(at)
    values = [float((seed * (index + 3) ** 2) % 1009) for index in range(size)]
    for index, value in draw(st.dictionaries(st.integers(0, size - 1), FINITE, max_size=5)).items():
        values[index] = value
    points = SortedPoints()
    points.extend(steps, [step / 7 for step in steps], values)
    return points


@st.composite
def windows(draw: st.DrawFn) -> Window:
    low = draw(st.floats(-2000, 5000))
    high = low + draw(st.sampled_from([0.0, 1e-9, 1.0, 50.0, 1e6]) | st.floats(0, 3000))
    axis = draw(st.sampled_from(["step", "time"]))
    return Window(axis=axis, low=low, high=high, num_columns=draw(st.integers(1, 40)))


@given(filled(), windows())
def test_each_column_keeps_its_lowest_and_highest_value(points: SortedPoints, window: Window) -> None:
    reduced = reduce_points(points, window)
    xs = points.positions(window.axis)
    shown = list(zip(reduced.xs, reduced.ys, strict=True))
    edges = column_edges(window)
    bounds = [bisect_left(xs, edge) for edge in edges[:-1]] + [bisect_right(xs, edges[-1])]
    for start, stop in pairwise(bounds):
        if start < stop:
            inside = [y for x, y in shown if xs[start] <= x <= xs[stop - 1]]
            assert min(points.values[start:stop]) in inside
            assert max(points.values[start:stop]) in inside


@given(filled(), windows())
def test_what_is_shown_are_points_in_order_and_few(points: SortedPoints, window: Window) -> None:
    reduced = reduce_points(points, window)
    there = list(zip(points.positions(window.axis), points.values, strict=True))
    rest = iter(there)
    assert all(point in rest for point in zip(reduced.xs, reduced.ys, strict=True)), (
        "a subsequence of the points"
    )
    assert len(reduced.xs) <= 2 * window.num_columns + 2
    assert len(reduced.means) <= 2 * window.num_columns + 2
    assert reduced.num_points == sum(window.low <= x <= window.high for x, _ in there)
    assert list(reduced.mean_xs) == sorted(reduced.mean_xs)


@given(filled(), windows())
def test_the_line_goes_on_to_the_neighbours_outside(points: SortedPoints, window: Window) -> None:
    xs = points.positions(window.axis)
    reduced = reduce_points(points, window)
    left = [x for x in xs if x < window.low]
    right = [x for x in xs if x > window.high]
    assert [x for x in reduced.xs if x < window.low] == left[-1:]
    assert [x for x in reduced.xs if x > window.high] == right[:1]


@given(filled(), windows())
def test_means_lie_between_the_extremes(points: SortedPoints, window: Window) -> None:
    reduced = reduce_points(points, window)
    low, high = min(points.values), max(points.values)
    room = 1e-9 * max(abs(low), abs(high))
    assert all(low - room <= mean <= high + room for mean in reduced.means)


@given(st.floats(-1e15, 1e15), st.floats(0, 1e15), st.integers(1, 500))
def test_edges_of_columns_never_decrease(low: float, span: float, num_columns: int) -> None:
    edges = column_edges(Window(axis="time", low=low, high=low + span, num_columns=num_columns))
    assert len(edges) == num_columns + 1
    assert edges == sorted(edges)
    assert (edges[0], edges[-1]) == (low, low + span)


@given(filled(), windows())
def test_marks_stand_in_every_column_that_has_one(points: SortedPoints, window: Window) -> None:
    marks = marked_columns(points, window)
    xs = points.positions(window.axis)
    assert set(marks) <= set(xs)
    edges = column_edges(window)
    for start, stop in pairwise(
        [bisect_left(xs, edge) for edge in edges[:-1]] + [bisect_right(xs, edges[-1])]
    ):
        if start < stop:
            assert any(xs[start] <= mark <= xs[stop - 1] for mark in marks)
    assert len(marks) <= window.num_columns


def test_values_whose_sum_is_no_number_have_a_mean() -> None:
    points = SortedPoints()
    points.extend(list(range(9)), [0.0] * 9, [1.7e308] * 9)
    reduced = reduce_points(points, Window(axis="step", low=0, high=8, num_columns=2))
    assert list(reduced.means) == [pytest.approx(1.7e308)] * 2


def test_a_part_of_the_points_is_reduced_alone() -> None:
    points = SortedPoints()
    points.extend(
        list(range(100)), [float(step) for step in range(100)], [float(step) for step in range(100)]
    )
    reduced = reduce_points(points, Window(axis="step", low=0, high=99, num_columns=5), 20, 40)
    assert (min(reduced.ys), max(reduced.ys), reduced.num_points) == (20, 39, 20)
