"""Format ages and tables for a terminal, and show the progress of long work."""

import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from math import isfinite
from typing import Self

from drivetrain_messages import format_size, format_table

_AGES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_REDRAW_SECONDS = 0.2
_LINE_SECONDS = 10.0  # where stderr is a file


def age_text(saved_at: str, now: datetime) -> str:
    """Format the time since a manifest's `saved_at` in its largest unit: "3 h"."""
    seconds = max(0, int((now - datetime.fromisoformat(saved_at)).total_seconds()))
    length, unit = next(((length, unit) for length, unit in _AGES if seconds >= length), _AGES[-1])
    return f"{seconds // length} {unit}"


def time_text(saved_at: str) -> str:
    """Format a manifest's `saved_at` for people: "2026-01-31 12:00:00 UTC"."""
    return f"{datetime.fromisoformat(saved_at):%Y-%m-%d %H:%M:%S %Z}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table with one line per row and columns as wide as needed; it ends with a line break."""
    return format_table([[name.upper() for name in header], *rows]) + "\n"


def metrics_as_json(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return metrics for JSON; infinities and NaNs become null, because JSON cannot express them."""
    return {name: value if isfinite(value) else None for name, value in metrics.items()}


class Progress:
    """Show bytes and rate on stderr: one updated line on a terminal, else periodic lines."""

    def __init__(self, doing: str, total_bytes: int) -> None:
        self._doing = doing
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._began = self._shown = time.monotonic()
        self._redraws = sys.stderr.isatty()

    def advance(self, num_bytes: int) -> None:
        """Count bytes as done, and update the display at intervals."""
        self._done_bytes += num_bytes
        now = time.monotonic()
        if now - self._shown >= (_REDRAW_SECONDS if self._redraws else _LINE_SECONDS):
            self._show(now)

    def _show(self, now: float) -> None:
        self._shown = now
        rate = int(self._done_bytes / max(now - self._began, 1e-6))
        done, total, speed = (format_size(size) for size in (self._done_bytes, self._total_bytes, rate))
        text = f"{self._doing}: {done} of {total}, {speed}/s"
        # Padding with spaces overwrites the rest of a longer line.
        sys.stderr.write(f"\r{text:<79}" if self._redraws else f"{text}\n")
        sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._show(time.monotonic())
        if self._redraws and self._shown > self._began:
            sys.stderr.write("\n")
