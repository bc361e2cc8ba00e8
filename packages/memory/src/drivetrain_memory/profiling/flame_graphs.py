"""A page with a flame graph of every rank: HTML alone, without a script or a request, all text escaped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from drivetrain_memory.profiling.operation_times import nest

_LEAST_SHARE = 0.001  # of the width; narrower calls are not drawn
_MOST_DEPTH = 60
_ROW_PIXELS = 19
_STYLE = """
body{font:14px system-ui,sans-serif;margin:1.5em;background:#fff;color:#222}
h1{font-size:1.3em} h2{font-size:1.05em;margin:1.4em 0 .4em}
.graph{position:relative;width:100%;overflow:hidden}
.graph div{position:absolute;height:17px;line-height:17px;font-size:11px;overflow:hidden;white-space:nowrap;
box-sizing:border-box;padding:0 3px;border-radius:2px;border-right:1px solid #fff}
.graph div:hover{outline:1px solid #000;z-index:1}
"""
_COLOURS = {"python_function": "#b8d4ea", "user_annotation": "#cfe8c5", "cpu_op": "#f5c28b"}


@dataclass(slots=True)
class _Box:
    """Calls of one name under the same callers, joined."""

    microseconds: float = 0.0
    count: int = 0
    category: str = ""
    inner: "dict[str, _Box]" = field(default_factory=dict)


def flame_graph(traces: Mapping[int, Sequence[Mapping[str, Any]]], *, title: str = "Flame graph") -> str:
    """Return a page with the flame graph of each rank's events, from `read_traces`, under a title.

    A call is as wide as its share of the time.
    """
    parts = [f"<h2>Rank {rank}</h2>{_draw_rank(events)}" for rank, events in sorted(traces.items())]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        "<p>A call is as wide as its share of the time, with what it calls below it. Point at one for its time.</p>"
        f"{''.join(parts)}</body></html>\n"
    )


def write_flame_graph(
    traces: Mapping[int, Sequence[Mapping[str, Any]]], file: Path | str, *, title: str = "Flame graph"
) -> Path:
    """Write the page of `flame_graph` to a file, whose folder is created; return its path."""
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(flame_graph(traces, title=title), encoding="utf-8")
    return path


def _draw_rank(events: Sequence[Mapping[str, Any]]) -> str:
    root = _Box()
    pending = [(root, span) for spans in nest(events).values() for span in spans]
    while pending:
        parent, span = pending.pop()
        one = parent.inner.setdefault(span.name, _Box(category=span.category))
        one.microseconds += span.duration_us
        one.count += 1
        pending += [(one, inner) for inner in span.inner]
    root.microseconds = sum(one.microseconds for one in root.inner.values())
    boxes: list[str] = []
    deepest = _draw(root, boxes, 0.0, 0, root.microseconds or 1.0)
    return f'<div class="graph" style="height:{deepest * _ROW_PIXELS}px">{"".join(boxes)}</div>'


def _draw(box: _Box, boxes: list[str], left: float, depth: int, whole: float) -> int:
    """Draw the calls inside a box, the longest first; return the number of rows down to the deepest call."""
    deepest = depth
    for name, one in sorted(box.inner.items(), key=lambda item: (-item[1].microseconds, item[0])):
        share = one.microseconds / whole
        if share < _LEAST_SHARE or depth >= _MOST_DEPTH:
            continue
        told = f"{name}: {one.microseconds / 1000:.3f} ms, {one.count} calls, {share:.1%}"
        boxes.append(
            f'<div style="left:{left:.3%};width:{share:.3%};top:{depth * _ROW_PIXELS}px;'
            f'background:{_COLOURS.get(one.category, "#e3b5c4")}" title="{escape(told)}">{escape(name)}</div>'
        )
        deepest = max(deepest, depth + 1, _draw(one, boxes, left, depth + 1, whole))
        left += share
    return deepest
