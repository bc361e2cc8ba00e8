from math import inf, isfinite, nan

from hypothesis import given
from hypothesis import strategies as st

from drivetrain_tracking.view.curve import Curve

ANY_FLOAT = st.floats()


def extend(curve: Curve, attempt: int, steps: list[int], values: list[float] | None = None) -> None:
    times = [float(index) for index in range(len(steps))]
    curve.extend(attempt, steps, times, values or [1.0] * len(steps))


def shown(curve: Curve) -> list[tuple[int, list[int], bool]]:
    return [
        (piece.branch.attempt, list(piece.branch.points.steps[piece.start : piece.stop]), piece.is_replaced)
        for piece in curve.pieces()
    ]


def test_steps_that_are_logged_again_replace_the_earlier_attempt() -> None:
    curve = Curve()
    extend(curve, 1, [1, 2, 3, 4])
    extend(curve, 2, [3, 4, 5])
    assert shown(curve) == [(1, [1, 2], False), (1, [3, 4], True), (2, [3, 4, 5], False)]


def test_an_attempt_that_falls_back_further_replaces_all_between() -> None:
    curve = Curve()
    extend(curve, 1, [1, 2, 3, 4])
    extend(curve, 2, [4, 5])
    extend(curve, 3, [2, 3])
    assert shown(curve) == [(1, [1], False), (1, [2, 3, 4], True), (2, [4, 5], True), (3, [2, 3], False)]


def test_steps_that_fall_back_within_an_attempt_lose_nothing() -> None:
    curve = Curve()
    extend(curve, 1, [10, 1, 20, 2, 30, 3])
    assert shown(curve) == [(1, [10, 20, 30], False), (1, [1, 2, 3], False)]
    assert curve.num_left_out == 0


def test_points_that_no_branch_takes_are_counted() -> None:
    curve = Curve()
    extend(curve, 1, list(range(100, 0, -1)))
    assert curve.num_left_out == 100 - 32
    assert curve.num_points == 100


@given(st.lists(st.lists(ANY_FLOAT, min_size=1, max_size=20), max_size=4))
def test_finite_values_and_marks_are_all_values(parts: list[list[float]]) -> None:
    curve = Curve()
    step = 0
    for part in parts:
        extend(curve, 1, list(range(step, step + len(part))), part)
        step += len(part)
    values = [value for part in parts for value in part]
    kept = [value for branch in curve.branches for value in branch.points.values]
    assert kept == [value for value in values if isfinite(value)]
    marks = {
        kind: [step for branch in branches for step in branch.points.steps]
        for kind, branches in curve.marks.items()
    }
    assert marks["nan"] == [step for step, value in enumerate(values) if value != value]
    assert marks["inf"] == [step for step, value in enumerate(values) if value == inf]
    assert marks["-inf"] == [step for step, value in enumerate(values) if value == -inf]


def test_a_log_of_nan_alone_has_marks_alone() -> None:
    curve = Curve()
    extend(curve, 1, [1, 2], [nan, nan])
    assert list(curve.pieces()) == []
    assert list(curve.marks["nan"][0].points.steps) == [1, 2]
