"""The output of `drivetrain memory watch` while it runs: a table in place on a terminal, plain lines elsewhere."""

from collections.abc import Mapping
from typing import TextIO

from drivetrain_memory.report.quantities import number_text, seconds_text

_SHOWN = {
    "host/resident_bytes": "resident",
    "host/proportional_bytes": "proportional",
    "children/resident_bytes": "children",
    "children/count": "processes below it",
    "cgroup/held_bytes": "control group held",
    "cgroup/cache_bytes": "page cache",
    "cgroup/limit_bytes": "limit",
}
_LINE_SECONDS = 5.0  # between two plain lines
_UP, _CLEAR_LINE = "\x1b[{}A", "\x1b[2K"


class LiveTable:
    """The output of a watch in progress."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._num_lines = 0
        self._next_line = 0.0
        self._most: dict[str, float] = {}

    def show(self, newest: Mapping[str, float]) -> None:
        """Show a sample, with the highest of each column so far."""
        for name, value in newest.items():
            if value == value and value > self._most.get(name, float("-inf")):
                self._most[name] = value
        seconds = newest["seconds"]
        if self._is_terminal:
            lines = table_lines(newest, self._most)
            up = _UP.format(self._num_lines) if self._num_lines else ""
            self._stream.write(up + "".join(f"{_CLEAR_LINE}{line}\n" for line in lines))
            self._stream.flush()
            self._num_lines = len(lines)
        elif seconds >= self._next_line:
            self._next_line = seconds + _LINE_SECONDS
            self._stream.write(f"{plain_line(newest)}\n")
            self._stream.flush()


def table_lines(newest: Mapping[str, float], most: Mapping[str, float]) -> list[str]:
    """Return the table's lines, with the current and the highest value of each number."""
    lines = [f"{seconds_text(newest['seconds']):<28} {'now':>12} {'at most':>12}"]
    for name in _names(newest):
        now, highest = number_text(name, newest[name]), number_text(name, most.get(name, float("nan")))
        lines.append(f"{_SHOWN.get(name, name):<28} {now:>12} {highest:>12}")
    return lines


def plain_line(newest: Mapping[str, float]) -> str:
    """Return a sample as one line."""
    numbers = [f"{_SHOWN.get(name, name)} {number_text(name, newest[name])}" for name in _names(newest)]
    return f"{seconds_text(newest['seconds'])}: {', '.join(numbers)}"


def _names(newest: Mapping[str, float]) -> list[str]:
    """Return the columns to show: the host's known numbers, and all numbers of devices."""
    hidden = ("seconds", "host/shared_bytes", "children/proportional_bytes", "cgroup/current_bytes")
    return [name for name, value in newest.items() if name not in hidden and value == value]
