"""The step that the doctor is at: one line that changes on a terminal, a line for each step elsewhere."""

import shutil
import time
from typing import TextIO

_WAIT_SECONDS = 5.0


class StepDisplay:
    """Shows steps on a stream; call it with each step, and `clear` at the end.

    A step that repeats, such as a wait, is shown at most every five seconds where lines cannot be changed.
    """

    def __init__(self, stream: TextIO, *, is_shown: bool = True) -> None:
        self._stream = stream
        self._is_shown = is_shown
        self._is_terminal = stream.isatty()
        self._last = ""
        self._shown_at = float("-inf")

    def __call__(self, step: str) -> None:
        """Show a step."""
        if not self._is_shown or step == self._last:
            return
        now = time.monotonic()
        if self._is_terminal:
            width = shutil.get_terminal_size().columns
            self._stream.write(f"\r\x1b[K{f'doctor: {step} ...'[: width - 1]}")
        elif not step.startswith("waiting") or now - self._shown_at > _WAIT_SECONDS:
            self._stream.write(f"drivetrain: doctor: {step}\n")
            self._shown_at = now
        self._stream.flush()
        self._last = step

    def clear(self) -> None:
        """Remove the line from the terminal."""
        if self._is_terminal and self._is_shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
