"""The line of `drivetrain memory watch` while it runs: in place on a terminal, every few seconds elsewhere."""

import math
import shutil
from collections.abc import Mapping
from datetime import timedelta
from typing import TextIO

from drivetrain_memory.report.quantities import bytes_text

_LINE_SECONDS = 5.0  # between two lines that stay
_IN_PLACE = "\r\x1b[2K"  # to the line's begin, which is cleared


class WatchLine:
    """The output of a watch in progress."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._next_line = 0.0

    def show(self, newest: Mapping[str, float], peak_bytes: float) -> None:
        """Show a sample, and the process's peak so far."""
        line = usage_line(newest, peak_bytes)
        if self._is_terminal:
            # A line that is wrapped could not be cleared.
            self._stream.write(f"{_IN_PLACE}{line[: shutil.get_terminal_size((100, 24)).columns - 1]}")
        elif newest["seconds"] >= self._next_line:
            self._next_line = newest["seconds"] + _LINE_SECONDS
            self._stream.write(f"{line}\n")
        self._stream.flush()

    def end(self, text: str) -> None:
        """Write what stands after the last line."""
        self._stream.write(f"{_IN_PLACE if self._is_terminal else ''}{text}\n")


def usage_line(newest: Mapping[str, float], peak_bytes: float) -> str:
    """Return a sample as one line of at most 100 columns, whose sizes stand below those of the line before.

    It has the process, its peak, the fullest device, what is left to the control group's limit (without a limit, what
    it holds), and the children. What is not known, or 0, is left out.
    """
    held, limit = (newest.get(f"cgroup/{name}_bytes", math.nan) for name in ("held", "limit"))
    devices = {
        name.rpartition("/")[0]: value for name, value in newest.items() if name.endswith("/used_bytes")
    }
    fullest = max(devices, key=lambda device: devices[device], default="")
    sizes = {
        "process": newest.get("host/resident_bytes", math.nan),
        "peak": peak_bytes,
        fullest: devices.get(fullest, math.nan),
        **({"cgroup": held} if math.isnan(limit) else {"left": max(limit - held, 0.0)}),
        "children": newest.get("children/resident_bytes", math.nan),
    }
    fields = [
        f"{label} {bytes_text(size):>9}" for label, size in sizes.items() if size > 0 or label == "left"
    ]
    return "  ".join([str(timedelta(seconds=int(newest["seconds"]))), *fields])
