"""Show the doctor's current step: one changing line on a terminal, or else a line for each step."""

import shutil
import time
from typing import TextIO

_WAIT = "waiting"


class StepDisplay:
    """A display of steps on a stream. Call it with each step, and call `clear` at the end.

    If the stream is no terminal, each step is a line. Of several waits in a row, such as waits for fewer and fewer
    hosts, only some are shown.
    """

    def __init__(self, stream: TextIO, *, seconds_between_waits: float = 5.0) -> None:
        self._stream = stream
        self._seconds_between_waits = seconds_between_waits
        self._is_terminal = stream.isatty()
        self._last = ""
        self._shown_at = float("-inf")

    def __call__(self, step: str) -> None:
        """Show a step."""
        if step == self._last:
            return
        if self._is_terminal:
            width = shutil.get_terminal_size().columns
            self._stream.write(f"\r\x1b[K{f'doctor: {step} ...'[: width - 1]}")
        elif (
            step.startswith(_WAIT)
            and self._last.startswith(_WAIT)
            and time.monotonic() - self._shown_at < self._seconds_between_waits
        ):
            return  # the last step stays, so that a later call shows this wait
        else:
            self._stream.write(f"drivetrain: doctor: {step}\n")
        self._stream.flush()
        self._last, self._shown_at = step, time.monotonic()

    def clear(self) -> None:
        """Remove the line from the terminal."""
        if self._is_terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
