"""Draw the memory of plans: a bar for each, of its components, beside what a device has. Pure."""

from html import escape

from drivetrain_messages import format_size
from drivetrain_plan.search.ranking import PlanTable

_COLOURS = {
    "weights": "#3b6ea8", "states": "#7aa6d6", "gradients": "#d98b3a", "activations": "#6aa66a",
    "temporary": "#b9b9b9",
}  # fmt: skip
_ROW, _LEFT, _WIDTH, _TOP = 26, 300, 480, 58


def draw_plans(table: PlanTable, number: int) -> str:
    """Return an SVG picture of the first plans, and of the nearest that do not fit."""
    fitting, others = table.plans[:number], table.rejected[:3]
    shown = [*fitting, *others]
    limit = table.hardware.memory_bytes
    most = max([limit, *(plan.memory.peak for plan in shown)])
    height = _TOP + _ROW * len(shown) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 120}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<text x="8" y="20" font-size="14">{escape(table.model)} on {escape(table.hardware.described())}: '
        "memory of a device</text>",
    ]
    for place, (name, colour) in enumerate(_COLOURS.items()):
        x = _LEFT + 96 * place
        parts.append(f'<rect x="{x}" y="32" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14}" y="41">{name}</text>')
    for row, plan in enumerate(shown):
        y, x = _TOP + _ROW * row, float(_LEFT)
        shade = "" if row < len(fitting) else ' fill="#999"'
        parts.append(
            f'<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end"{shade}>{escape(plan.choice.name)}</text>'
        )
        for name, colour in _COLOURS.items():
            width = getattr(plan.memory, name) / most * _WIDTH
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="18" fill="{colour}"/>')
            x += width
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 14}"{shade}>{format_size(int(plan.memory.peak))}</text>')
    line = _LEFT + limit / most * _WIDTH
    bottom = _TOP + _ROW * len(shown)
    parts.append(f'<line x1="{line:.1f}" y1="{_TOP - 6}" x2="{line:.1f}" y2="{bottom}" stroke="#b22"/>')
    parts.append(
        f'<text x="{line:.1f}" y="{bottom + 16}" text-anchor="middle" fill="#b22">{format_size(limit)}</text>'
    )
    return "\n".join([*parts, "</svg>\n"])
