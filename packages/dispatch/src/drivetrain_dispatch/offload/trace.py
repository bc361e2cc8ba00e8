"""The trace of a dispatched model: when each unit was fetched, waited for and computed, and a plot."""

from html import escape
from typing import NamedTuple

_WIDTH, _LEFT, _TOP, _LANE, _GAP = 900, 90, 40, 34, 12  # pixels
_COLOURS = {"fetched": "#4c78a8", "waited for": "#e45756", "computed": "#54a24b"}


class UnitUse(NamedTuple):
    """A use of a unit; each time span is its begin and end in seconds."""

    name: str
    # The span in which its weights were copied or read; empty if they were there already.
    fetched: tuple[float, float]
    waited: tuple[float, float]  # the span in which the forward waited for them
    # The span from then until the module returned; on an accelerator, until its work was enqueued.
    computed: tuple[float, float]


class OffloadTrace:
    """The uses of units in forwards, in the order in which they ended."""

    def __init__(self) -> None:
        self.uses: list[UnitUse] = []

    def svg(self) -> str:
        """Return an SVG plot over time, with a lane each for transfers, waits (in red) and computation."""
        if not self.uses:
            raise ValueError(
                "nothing was traced: call the model within trace_offload(model); weights that stay, or that the host "
                "uses in their file, do not come and go and leave no trace"
            )
        start = min(min(use.fetched[0], use.waited[0]) for use in self.uses)
        end = max(use.computed[1] for use in self.uses)
        scale = _WIDTH / max(end - start, 1e-9)
        lanes = list(_COLOURS)
        height = _TOP + len(lanes) * (_LANE + _GAP) + 30
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" height="{height}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="100%" height="100%" fill="white"/><text x="{_LEFT}" y="20">'
            f"{len(self.uses)} units in {(end - start) * 1e3:.1f} ms</text>",
        ]
        for number, lane in enumerate(lanes):
            top = _TOP + number * (_LANE + _GAP)
            parts.append(f'<text x="8" y="{top + _LANE / 2 + 4}">{lane}</text>')
            for use in self.uses:
                begin, stop = (use.fetched, use.waited, use.computed)[number]
                if stop > begin:
                    parts.append(
                        f'<rect x="{_LEFT + (begin - start) * scale:.1f}" y="{top}" '
                        f'width="{max((stop - begin) * scale, 0.5):.1f}" height="{_LANE}" '
                        f'fill="{_COLOURS[lane]}" stroke="white" stroke-width="0.5">'
                        f"<title>{escape(use.name)}: {(stop - begin) * 1e3:.2f} ms</title></rect>"
                    )
        for tenth in range(11):
            x = _LEFT + tenth * _WIDTH / 10
            parts.append(
                f'<text x="{x:.0f}" y="{height - 8}" text-anchor="middle">'
                f"{(end - start) * tenth * 100:.1f} ms</text>"
            )
        return "\n".join([*parts, "</svg>\n"])
