"""The answers to a page's questions, as plain values for JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import Any, Literal

from drivetrain_tracking.values.plain import Plain
from drivetrain_tracking.values.records import flat_values
from drivetrain_tracking.view.curve import Curve
from drivetrain_tracking.view.downsampling import Window, marked_columns, reduce_points
from drivetrain_tracking.view.run_index import RunIndex
from drivetrain_tracking.view.sorted_points import Axis

ShownAxis = Literal["step", "time", "relative"]
_MOST_MEDIA = 200  # the newest; each is a picture to load
_SHOWN_FACTS = (
    "start_time",
    "last_time",
    "last_step",
    "attempt",
    "ended",
    "num_damaged",
    "num_lost",
    "num_foreign",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveQuestion:
    """A question for one metric of some runs."""

    metric: str
    runs: Sequence[int]  # by index
    axis: ShownAxis  # steps, times, or seconds since the start of each run
    low: float | None  # None for the first point
    high: float | None  # None for the last point
    num_columns: int  # the width of the picture in pixels


def describe_run(index: int, run: RunIndex) -> dict[str, Any]:
    """Return the entry of a run for the list of runs."""
    with run.lock:
        facts = run.facts
        return {
            "id": index,
            "label": run.place.label,
            "folder": str(run.place.path.parent),
            "run": facts.run_name,
            **{name: getattr(run, name) for name in ("version", "read_bytes", "size_bytes", "problem")},
            **{name: getattr(facts, name) for name in _SHOWN_FACTS},
            "num_left_out": sum(curve.num_left_out for curve in run.curves.values()),
            "num_media": len(facts.media),
            "metrics": {name: curve.num_points for name, curve in run.curves.items()},
        }


def describe_details(run: RunIndex) -> dict[str, Any]:
    """Return a run's start values, its texts, and its newest media."""
    with run.lock:
        facts = run.facts
        first = max(0, len(facts.media) - _MOST_MEDIA)
        return {
            "config": flat_values(facts.config),
            "plan": flat_values(facts.plan),
            "info": flat_values(facts.info),
            "texts": dict(facts.texts),
            "media": [
                {
                    "id": first + index,
                    **{name: getattr(medium, name) for name in ("name", "kind", "step", "caption", "data")},
                    "has_file": medium.file is not None,
                }
                for index, medium in enumerate(facts.media[first:])
            ],
        }


def describe_differences(first: RunIndex, second: RunIndex) -> dict[str, Any]:
    """Return the configurations and plans of two runs side by side."""
    sides: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for run in (first, second):
        with run.lock:
            sides.append((dict(run.facts.config), dict(run.facts.plan)))
    (config, plan), (other_config, other_plan) = sides
    return {"config": compare_values(config, other_config), "plan": compare_values(plan, other_plan)}


def answer_curves(runs: Sequence[RunIndex], question: CurveQuestion) -> dict[str, Any]:
    """Return the points of a metric in several runs, reduced to the points that a picture of the range can show."""
    chosen = [(index, runs[index]) for index in question.runs if index < len(runs)]
    low, high = _range_of([run for _, run in chosen], question)
    answered: list[dict[str, Any]] = []
    for index, run in chosen:
        with run.lock:
            curve = run.curves.get(question.metric)
            if curve is None:
                continue
            axis, origin = _axis_and_origin(run, question)
            num_columns = question.num_columns
            window = Window(axis=axis, low=low + origin, high=high + origin, num_columns=num_columns)
            answered.append({"run": index, **_describe_curve(curve, window, origin)})
    return {"metric": question.metric, "low": low, "high": high, "curves": answered}


def compare_values(first: Mapping[str, Plain], second: Mapping[str, Plain]) -> list[dict[str, Any]]:
    """Compare nested values; names of the first run come first, in its order, then other names of the second.

    Values are JSON texts, or None if a run lacks the name. So 1 and 1.0 are different.
    """
    left, right = (
        {name: json.dumps(value, ensure_ascii=False) for name, value in flat_values(values).items()}
        for values in (first, second)
    )
    return [
        {
            "name": name,
            "first": left.get(name),
            "second": right.get(name),
            "is_different": left.get(name) != right.get(name),
        }
        for name in dict.fromkeys([*left, *right])
    ]


def _describe_curve(curve: Curve, window: Window, origin: float) -> dict[str, Any]:
    pieces: list[dict[str, Any]] = []
    for piece in curve.pieces():
        reduced = reduce_points(piece.branch.points, window, piece.start, piece.stop)
        is_all = reduced.mean_xs is reduced.xs
        if reduced.xs:
            pieces.append(
                {
                    "attempt": piece.branch.attempt,
                    "is_replaced": piece.is_replaced,
                    "x": [x - origin for x in reduced.xs],
                    "y": list(reduced.ys),
                    "mean_x": None if is_all else [x - origin for x in reduced.mean_xs],
                    "mean_y": None if is_all else list(reduced.means),
                    "num_points": reduced.num_points,
                }
            )
    marks = {
        kind: sorted({x - origin for branch in branches for x in marked_columns(branch.points, window)})
        for kind, branches in curve.marks.items()
    }
    return {"pieces": pieces, "marks": marks, "num_points": curve.num_points}


def _range_of(runs: Sequence[RunIndex], question: CurveQuestion) -> tuple[float, float]:
    """Return the ends of the axis: the ends that the question gives, else the ends of the points."""
    low, high = inf, -inf
    for run in runs:
        with run.lock:
            curve = run.curves.get(question.metric)
            axis, origin = _axis_and_origin(run, question)
            for branch in [] if curve is None else chain(curve.branches, *curve.marks.values()):
                xs = branch.points.positions(axis)
                low, high = min(low, xs[0] - origin), max(high, xs[-1] - origin)
    if low > high:
        low = high = 0.0
    low = low if question.low is None else question.low
    high = high if question.high is None else question.high
    return low, max(low, high)


def _axis_and_origin(run: RunIndex, question: CurveQuestion) -> tuple[Axis, float]:
    """Return the points' axis that a question needs, and the position where the shown axis begins."""
    if question.axis == "step":
        return "step", 0.0
    return "time", (run.facts.start_time or 0.0) if question.axis == "relative" else 0.0
