"""The curves of a run for its model card, read from the run's log, and a picture of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from operator import itemgetter
from pathlib import Path

from drivetrain_tracking.values.records import flat_values
from drivetrain_tracking.view.curve import Piece
from drivetrain_tracking.view.downsampling import Window, reduce_points
from drivetrain_tracking.view.log_reader import LogPlace
from drivetrain_tracking.view.run_index import RunIndex

_COLOURS = ("#3b6ea8", "#d98b3a", "#6aa66a", "#b0413e", "#7d5ba6", "#666666")
_WIDTH, _HEIGHT, _LEFT, _TOP = 640, 260, 64, 30

Point = tuple[float, float]  # a step and the value there


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricCurve:
    """A metric of a run, without the steps that a resumed run has repeated.

    Attributes:
        name: The metric's name.
        last: The newest value, which may be NaN or infinite.
        points: The finite points that a picture needs, by step; the lowest and the highest are among them.
    """

    name: str
    last: float
    points: Sequence[Point]


def read_curves(log: Path) -> tuple[dict[str, float], list[MetricCurve]]:
    """Read the numbers of a run's configuration and its curves from `log.jsonl`; nothing from a missing log."""
    run = RunIndex(LogPlace(label=log.name, path=log))
    while run.advance():
        pass
    config = flat_values(run.facts.config)
    curves: list[MetricCurve] = []
    for name, curve in run.curves.items():
        kept = (point for piece in curve.pieces() if not piece.is_replaced for point in _reduced(piece))
        curves.append(MetricCurve(name=name, last=curve.last, points=sorted(kept, key=itemgetter(0))))
    return {name: value for name, value in config.items() if isinstance(value, (int, float))}, curves


def draw_losses(curves: Sequence[MetricCurve]) -> str | None:
    """Return an SVG picture of up to six curves with "loss" in their names; None if there is no such curve."""
    losses = [one for one in curves if "loss" in one.name.lower() and one.points][: len(_COLOURS)]
    if not losses:
        return None
    xs, ys = zip(*(point for one in losses for point in one.points), strict=True)
    (left, right), (low, high) = (min(xs), max(xs)), (min(ys), max(ys))
    right, high = (right if right > left else left + 1), (high if high > low else low + 1)
    bottom = _TOP + _HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 24}" height="{bottom + 34}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        x, y = _LEFT + share * _WIDTH, bottom - share * _HEIGHT
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y:g}" y2="{y:g}" stroke="#ddd"/>')
        value, step = low + share * (high - low), left + share * (right - left)
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:g}" text-anchor="end">{value:.4g}</text>')
        parts.append(f'<text x="{x:g}" y="{bottom + 18}" text-anchor="middle">{step:,.0f}</text>')
    for place, (one, colour) in enumerate(zip(losses, _COLOURS, strict=False)):
        scaled = (
            ((x - left) / (right - left) * _WIDTH + _LEFT, bottom - (y - low) / (high - low) * _HEIGHT)
            for x, y in one.points
        )
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in scaled)
        line = f"{line} {line}" if len(one.points) == 1 else line  # round caps make a dot of it
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2" stroke-linecap="round"/>'
            f'<text x="{_LEFT + place * _WIDTH // len(losses)}" y="18" fill="{colour}">{escape(one.name)}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def _reduced(piece: Piece) -> Iterable[Point]:
    points, start, stop = piece.branch.points, piece.start, piece.stop
    window = Window(
        axis="step", low=points.steps[start], high=points.steps[stop - 1], num_columns=_WIDTH // 2
    )
    reduced = reduce_points(points, window, start, stop)
    return zip(reduced.xs, reduced.ys, strict=True)
