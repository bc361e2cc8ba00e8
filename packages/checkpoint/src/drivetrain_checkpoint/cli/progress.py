"""Show the progress of long work on stderr as bytes and rate: one updated line on a terminal, else periodic lines."""

import sys
import time
from types import TracebackType
from typing import Self

from drivetrain_messages import format_size

_REDRAW_SECONDS = 0.2
_LINE_SECONDS = 10.0  # where stderr is a file


class Progress:
    """A progress display on stderr."""

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._show(time.monotonic())
        if self._redraws and self._shown > self._began:
            sys.stderr.write("\n")
