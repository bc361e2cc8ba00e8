"""A line with the speed of training, redrawn in place on a terminal; elsewhere, a plain line at intervals."""

import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Protocol, TextIO

from drivetrain_throughput.meter import Throughput

_REDRAW_SECONDS = 0.25


class LinePainter(Protocol):
    """A way to show a line of text."""

    def show(self, text: str) -> None:
        """Show a line in place of the line before, or below it."""
        ...

    def close(self) -> None:
        """Remove the line that is shown."""
        ...


class _PlainLines:
    """Lines below each other on a stream; if the stream is None, on the current standard error."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def show(self, text: str) -> None:
        """Write the line at once."""
        stream = self._stream or sys.stderr
        stream.write(f"{text}\n")
        stream.flush()

    def close(self) -> None:
        """Do nothing: lines stay."""


class LiveLine:
    """A line with the step and its throughput. Create it on rank 0 only.

    On a terminal, and where rich is installed (the extra `live`), the line stays at the bottom, and prints and
    logging go above it. Elsewhere, a line is written at an interval.

    Args:
        stream: The stream of the line; the standard error if None.
        interval_seconds: The seconds between two lines where they cannot be redrawn.
        clock: A function that returns seconds.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        interval_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._painter: LinePainter | None = None
        self._next = float("-inf")

    def show(self, step: int, throughput: Throughput) -> None:
        """Show the line if the interval has passed; otherwise return at little cost."""
        now = self._clock()
        if now < self._next:
            return
        if self._painter is None:
            stream = self._stream or sys.stderr
            if stream.isatty() and find_spec("rich") is not None:
                from drivetrain_throughput.rich_line import RichLine

                self._interval_seconds = _REDRAW_SECONDS
                self._painter = RichLine(stream)
            else:
                self._painter = _PlainLines(self._stream)
        self._next = now + self._interval_seconds
        self._painter.show(live_text(step, throughput))

    def close(self) -> None:
        """Remove the line, and restore standard output and error; a later `show` draws the line again."""
        if self._painter is not None:
            self._painter.close()
            self._painter = None


def live_text(step: int, throughput: Throughput) -> str:
    """Return the text of the line, in ASCII.

    Example:
        >>> live_text(7, Throughput(num_steps=1, seconds=0.5, steps_per_second=2, mfu=0.412))
        'step 7 | 2.00 steps/s | MFU 41.2 %'
    """
    parts = [f"step {step}"]
    for rate, unit in (
        (throughput.steps_per_second, "steps/s"),
        (throughput.samples_per_second, "samples/s"),
        (throughput.tokens_per_second, "tokens/s"),
    ):
        if rate is not None:
            parts.append(f"{_format_short(rate)} {unit}")
    if throughput.mfu is not None:
        parts.append(f"MFU {100 * throughput.mfu:.1f} %")
    total = sum(throughput.phase_seconds.values())
    if total > 0:
        shares = {name: 100 * seconds / total for name, seconds in throughput.phase_seconds.items()}
        parts.append(", ".join(f"{name} {share:.0f} %" for name, share in shares.items() if share >= 0.5))
    return " | ".join(parts)


def _format_short(number: float) -> str:
    """Return three digits or more, such as 0.12, 12.3, 1234, 12.3k or 4.56M."""
    if number >= 1e9:
        return f"{number / 1e9:.2f}G"
    if number >= 1e6:
        return f"{number / 1e6:.2f}M"
    if number >= 1e4:
        return f"{number / 1e3:.1f}k"
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"
