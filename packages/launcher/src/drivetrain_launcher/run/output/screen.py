"""An output of the launch: rank 0 writes as if it were alone, whole lines of the other ranks stand between.

Standard library only, as the keeper process imports it without site-packages.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from drivetrain_launcher.run.output.cursor import CursorTracker, cell_width
from drivetrain_launcher.run.output.line_buffer import for_terminal

# How long lines of other ranks wait for rank 0 to end its line, in an output that is no terminal.
LINE_PATIENCE_SECONDS = 1.0
_COLOUR = re.compile("(\x1b\\[[0-?]*[ -/]*m)")
_TAB_COLUMNS = 8


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a terminal, in character cells."""

    columns: int
    rows: int


class Screen:
    """An output that several ranks share.

    `write` takes the bytes in order; `size` returns the terminal's size, and is None if the output is no terminal.
    """

    def __init__(self, write: Callable[[bytes], object], size: Callable[[], Size] | None) -> None:
        self._write = write
        self._size = size
        self._tracker = CursorTracker(80 if size is None else size().columns)
        self._held: list[bytes] = []
        self._held_since = 0.0

    @property
    def has_held(self) -> bool:
        """True if lines wait for rank 0 to end its own."""
        return bool(self._held)

    def write_leader(self, data: bytes, *, now: float) -> None:
        """Write bytes of rank 0, unchanged, then the lines that waited for the end of rank 0's line."""
        is_plain = b"\x1b" not in data and data.endswith(b"\n")
        if not self._held and is_plain and self._tracker.is_free and not self._tracker.follows_bar:
            self._write(data)  # nothing to follow: it stays at the start of a line
            return
        end = data.rfind(b"\n") + 1
        if self._held and self._size is None and 0 < end < len(data):
            self.write_leader(data[:end], now=now)  # what waits stands between two lines
            data = data[end:]
        self._write(data)
        self._tracker.feed(data)
        if self._held:
            self.release(now=now)

    def write_lines(self, lines: bytes, *, now: float) -> None:
        """Write whole lines of another rank, or of the launcher, once they cut no line of rank 0."""
        if not self._held and self._tracker.is_free and not self._tracker.follows_bar:
            self._write(lines if self._size is None else for_terminal(lines))
            return
        self._held_since = self._held_since if self._held else now
        self._held.append(lines)
        self.release(now=now)

    def release(self, *, now: float, at_once: bool = False) -> None:
        """Write the waiting lines if rank 0's output allows; `at_once` may end rank 0's line for that."""
        if not self._held:
            return
        tracker = self._tracker
        is_late = at_once or now - self._held_since >= LINE_PATIENCE_SECONDS
        if tracker.is_free:
            if is_late or not tracker.follows_bar:
                self._write_held(b"")
        elif self._size is None or (is_late and not tracker.is_ground):
            if is_late:  # a bar draws itself anew on the next line
                tracker.end_line()
                self._write_held(b"\n")
        elif at_once and tracker.is_elsewhere:
            tracker.end_line()
            self._write_held(b"\x1b[?1049l\r\n")
        elif tracker.is_ground and not tracker.is_elsewhere:
            lines, self._held = for_terminal(b"".join(self._held)), []
            size = self._size()
            tracker.columns = size.columns
            self._write(insert_above(lines, tracker, size))

    def end_leader_line(self) -> None:
        """End the line of rank 0, which writes no more."""
        if not self._tracker.is_free and not self._tracker.is_elsewhere:
            below = self._tracker.below if self._size is not None else 0
            self._write((f"\x1b[{below}B".encode() if below else b"") + b"\n")
        self._tracker.end_line()

    def _write_held(self, before: bytes) -> None:
        lines, self._held = b"".join(self._held), []
        self._write(before + (lines if self._size is None else for_terminal(lines)))


def insert_above(lines: bytes, tracker: CursorTracker, size: Size) -> bytes:
    """Return the bytes that insert whole lines above the rows of rank 0, which move down.

    The cursor ends at the same character as before. Every terminal since the VT102 can insert lines; text that has to
    leave the screen at its top is kept by the terminal as always.
    """
    rows = [row for line in lines[:-1].split(b"\n") for row in wrap(line, size.columns)]
    below = tracker.below
    room = max(1, size.rows - (tracker.above + below + 1))
    written = b""
    for first in range(0, len(rows), room):
        batch = rows[first : first + room]
        count = len(batch)
        above = min(tracker.above, max(0, size.rows - 1 - count - below))
        down = f"\x1b[{below}B" if below else ""
        up = f"\x1b[{above}A" if above else ""
        # Make room below, scrolling if there is none; then everything keeps its place while the cursor is away.
        scroll = "\x1bD" * count
        start = f"{down}{scroll}\x1b[{below + count}A\x1b7{up}\r\x1b[0m\x1b[{count}L"
        written += start.encode() + b"\r\n".join(batch) + f"\x1b8\x1b[{count}B".encode()
    return written


def wrap(line: bytes, columns: int) -> list[bytes]:
    """Cut a line, with colours and no other sequence, into rows of at most `columns` cells."""
    if line.isascii() and b"\x1b" not in line and b"\t" not in line:
        return [line[start : start + columns] for start in range(0, len(line), columns)] or [b""]
    rows: list[list[str]] = [[]]
    column = 0
    for part in _COLOUR.split(line.decode("utf-8", "surrogateescape")):
        if part.startswith("\x1b["):
            rows[-1].append(part)
            continue
        for character in part:
            text = " " * (_TAB_COLUMNS - column % _TAB_COLUMNS) if character == "\t" else character
            width = len(text) if character == "\t" else cell_width(character)
            if column + width > columns:
                rows.append([])
                column = 0
            rows[-1].append(text)
            column += width
    return ["".join(row).encode("utf-8", "surrogateescape") for row in rows]
