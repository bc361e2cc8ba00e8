"""Draw which ranks of a mesh share what, as the plan of the mesh says.

    uv run python tools/draw_mesh.py

It writes docs/images/mesh.svg; a test holds the file against what this draws.
"""

import sys
from pathlib import Path

from drivetrain_state import MeshPlan, ParallelDims
from drivetrain_state.mesh import View

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "mesh.svg"
PLAN: MeshPlan = ParallelDims(data=2, shard=2, context=2, tensor=2, expert=4).plan(16)
MEANINGS: dict[View, str] = {
    "tensor": "divide each layer, and what is between",
    "context": "divide each sequence",
    "replica": "compute one sample together",
    "reads": "read different samples",
    "counts": "average gradients and losses",
    "fsdp": "divide the parameters of one model",
    "expert": "hold different experts",
}
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#eeca3b", "#b279a2", "#9d755d")
_CELL, _LEFT, _ROW, _HEAD = 34, 330, 38, 60


def draw() -> str:
    """The picture, as SVG: ranks of one colour in a row are one part of the view."""
    ranks = range(16)
    width, height = _LEFT + len(ranks) * _CELL + 8, _HEAD + len(MEANINGS) * _ROW + 8
    product = " x ".join(f"{name} {size}" for name, size in zip(PLAN.names, PLAN.sizes, strict=True))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(8, 20, f"{product}, expert {PLAN.expert}"),
        _text(8, _HEAD - 14, "ranks of one colour in a row ...", fill="#808080"),
    ]
    parts += [_text(_LEFT + (rank + 0.5) * _CELL, _HEAD - 14, str(rank), anchor="middle") for rank in ranks]
    for number, (view, meaning) in enumerate(MEANINGS.items()):
        top = _HEAD + number * _ROW
        parts.append(_text(8, top + 19, f"{view}: {meaning}"))
        for index, part in enumerate(PLAN.parts(view)):
            for rank in part:
                left = _LEFT + rank * _CELL
                parts.append(
                    f'<rect x="{left}" y="{top}" width="{_CELL - 3}" height="{_ROW - 10}" rx="3" '
                    f'fill="{_COLOURS[index]}"/>'
                )
                parts.append(
                    _text(left + _CELL / 2 - 1.5, top + 19, str(index), anchor="middle", fill="white")
                )
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, *, anchor: str = "start", fill: str = "black") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}">{text}</text>'


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
    sys.stdout.write(f"{PICTURE}\n")
