"""A chart of lines over time as SVG text, with a strip of phases below. All text is escaped."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from drivetrain_memory.report.quantities import bytes_text, highest, seconds_text

# Okabe and Ito's colours, which colour-blind people tell apart too. Those of lines are no colours of areas, since a
# phase is drawn below a line; all are seen on a light and on a dark page.
LINE_COLOURS = ("#0072b2", "#d55e00", "#009e73", "currentColor")
AREA_COLOURS = ("#56b4e9", "#e69f00", "#cc79a7", "#f0e442", "#882255", "#ddddaa")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _STRIP = 920, 140, 76, 10, 24, 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of a chart."""

    label: str
    values: Sequence[float]
    is_limit: bool = False


def area_colour(index: int) -> str:
    """Return the colour of a phase, or of a part of a bar, by its place in the legend."""
    return AREA_COLOURS[index % len(AREA_COLOURS)]


def line_chart(
    lines: Sequence[Line],
    *,
    bucket_seconds: float,
    phases: Sequence[Mapping[str, float]] = (),
    phase_names: Sequence[str] = (),
) -> str:
    """Return the SVG of lines in bytes over time; a line that is never above 0 is left out, "" if all are.

    A line keeps the colour of its place in `lines`, at most four, whichever are left out. `phases` is the share of
    each phase in each bucket, 0 to 1, for the strip below.
    """
    drawn = [
        (colour, line) for colour, line in zip(LINE_COLOURS, lines, strict=False) if highest(line.values)
    ]
    if not drawn:
        return ""
    num_buckets = max(len(line.values) for _, line in drawn)
    most = max(1.0, *(highest(line.values) for _, line in drawn))
    unit = 10 ** math.floor(math.log10(most))
    steps = (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10)
    top = next(step * unit for step in steps if step * unit >= most * 0.9999999)
    strip = _STRIP if any(phases) else 0
    height = _TOP + _HEIGHT + strip + _BOTTOM
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img" '
        'font-family="sans-serif" font-size="11" fill="currentColor">'
    ]
    parts += _axes(top, bucket_seconds * num_buckets, strip)
    legend: list[tuple[str, str]] = []
    for colour, line in drawn:
        dash = ' stroke-dasharray="6 4"' if line.is_limit else ""
        at_most = f"at most {bytes_text(highest(line.values))}"
        title = f"<title>{escape(line.label)}: {at_most}</title>"
        parts += [
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}>{title}</path>'
            for path in _paths(line.values, num_buckets, top)
        ]
        legend.append((colour, f"{line.label} ({at_most})"))
    if strip:
        parts += _phase_strip(phases, phase_names, num_buckets)
    return "\n".join([*parts, "</svg>", _legend_of(legend)])


def phase_legend(phase_names: Sequence[str]) -> str:
    """Return the HTML legend of the strips of phases."""
    return _legend_of([(area_colour(index), name) for index, name in enumerate(phase_names)])


def _axes(top: float, seconds: float, strip: int) -> list[str]:
    parts: list[str] = []
    for tick in range(5):
        y = _TOP + _HEIGHT * (1 - tick / 4)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" opacity=".2"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{bytes_text(top * tick / 4)}</text>'
        )
    bottom = _TOP + _HEIGHT + strip + 16
    for tick in range(6):
        x = _LEFT + (_WIDTH - _LEFT) * tick / 5
        anchor = "start" if tick == 0 else "end" if tick == 5 else "middle"
        parts.append(
            f'<text x="{x:.1f}" y="{bottom}" text-anchor="{anchor}">{seconds_text(seconds * tick / 5)}</text>'
        )
    return parts


def _paths(values: Sequence[float], num_buckets: int, top: float) -> list[str]:
    """Return the paths of a line, with a gap at each missing number."""
    width = (_WIDTH - _LEFT) / num_buckets
    paths: list[str] = []
    points: list[str] = []
    for index, value in enumerate((*values, math.nan)):
        if not math.isnan(value):
            y = _TOP + _HEIGHT * (1 - value / top)
            # Each bucket is a level stretch: a point alone would not be seen.
            points += [f"{_LEFT + index * width:.1f},{y:.1f}", f"{_LEFT + (index + 1) * width:.1f},{y:.1f}"]
        elif points:
            paths.append("M" + " L".join(points))
            points = []
    return paths


def _phase_strip(
    phases: Sequence[Mapping[str, float]], phase_names: Sequence[str], num_buckets: int
) -> list[str]:
    width = (_WIDTH - _LEFT) / num_buckets
    parts: list[str] = []
    for index, shares in enumerate(phases):
        y = _TOP + _HEIGHT + 2.0
        for name in phase_names:
            if share := shares.get(name, 0.0):
                high = (_STRIP - 4) * share
                parts.append(
                    f'<rect x="{_LEFT + index * width:.2f}" y="{y:.2f}" width="{width:.2f}" height="{high:.2f}" '
                    f'fill="{area_colour(phase_names.index(name))}"><title>{escape(name)}: {share:.0%}</title></rect>'
                )
                y += high
    return parts


def _legend_of(items: Sequence[tuple[str, str]]) -> str:
    spans = [f'<span><i style="background:{colour}"></i>{escape(text)}</span>' for colour, text in items]
    return f'<div class="legend">{"".join(spans)}</div>' if items else ""
