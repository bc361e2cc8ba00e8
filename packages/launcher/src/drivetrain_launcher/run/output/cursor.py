"""Follow the cursor of rank 0, to know which rows of the terminal its bars may still rewrite.

Only relative positions are known: a bar moves the cursor up, down and to the start of a row. Standard library only,
as the keeper process imports it without site-packages.
"""

import re
from unicodedata import combining, east_asian_width

from drivetrain_launcher.run.output.line_buffer import whole_characters

_ESCAPE = re.compile(
    rb"\x1b(?:\[(?P<numbers>[0-?]*)[ -/]*(?P<final>[@-~])|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-Z\\^-~])"
)
_MAX_ESCAPE_BYTES = 4096


class CursorTracker:
    """The place of the cursor among the rows that one program may still rewrite.

    Attributes:
        columns: The width of the terminal.
        is_elsewhere: Whether the program has the whole screen, on the terminal's second page.
        follows_bar: Whether the line above was a bar: the program may draw a second one here, and go back up to the
            first.
    """

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.is_elsewhere = False
        self._rest = b""
        self._is_hidden = False
        self.follows_bar = False
        self._settle()

    @property
    def is_free(self) -> bool:
        """True if the cursor is at the start of a new line, below all that the program may rewrite.

        A program that has moved up comes back to the rows it has written: only a row below all of them is new.
        """
        is_below = self._is_fresh and self._row == self._bottom and (self._is_new or not self._has_moved_up)
        return is_below and self.is_ground and not self._is_hidden

    @property
    def is_ground(self) -> bool:
        """True if the bytes so far end with a complete escape sequence or character."""
        return not self._rest

    @property
    def above(self) -> int:
        """The number of rows above the cursor that the program may rewrite."""
        # The line may have wrapped.
        return self._row - self._top + max(0, self._column - 1) // max(1, self.columns)

    @property
    def below(self) -> int:
        """The number of rows below the cursor that the program has written."""
        return self._bottom - self._row

    def feed(self, data: bytes) -> None:
        """Follow the bytes that the program has written."""
        data = self._rest + data
        place = 0
        for found in _ESCAPE.finditer(data):
            self._text(data[place : found.start()])
            place = found.end()
            final, numbers = found["final"], found["numbers"] or b""
            rows = max(1, int(numbers)) if numbers.isdigit() else 1
            if final in (b"A", b"F"):
                self._row -= rows
                # A refresh that was cut may go further up: rows are given up only once the program has left them all.
                self._top, self._has_moved_up, self._is_fresh = min(self._top, self._row), True, False
            elif final in (b"B", b"E"):
                self._row += rows
                self._bottom, self._is_fresh = max(self._bottom, self._row), False
            elif final in (b"h", b"l") and numbers == b"?25":
                self._is_hidden = final == b"l"
                if self._is_hidden:
                    self._top = min(self._top, self._row)
            elif final in (b"h", b"l") and numbers in (b"?1049", b"?47", b"?1047"):
                self.is_elsewhere = final == b"h"
                self._settle()
            if final in (b"E", b"F", b"G"):
                self._column = 0
        rest = data[place:]
        cut = rest.find(b"\x1b")
        if cut < 0:
            cut = whole_characters(rest)
        self._text(rest[:cut])
        self._rest = rest[cut:] if len(rest) - cut <= _MAX_ESCAPE_BYTES else b""
        if self.is_free:
            self._settle()

    def end_line(self) -> None:
        """Note that another program has ended the line."""
        self._rest, self._is_hidden, self.is_elsewhere = b"", False, False
        self.follows_bar = False
        self._settle()

    def _settle(self) -> None:
        """Forget all rows above: the program will not come back to them."""
        self._row = self._top = self._bottom = self._column = 0
        self._is_fresh, self._has_moved_up, self._is_new = True, False, True
        self._is_bar = False

    def _text(self, text: bytes) -> None:
        if not text:
            return
        *lines, last = text.split(b"\n")
        if lines:
            self._row += len(lines)
            self._column, self._is_fresh = 0, True
            self._is_new = self._row > self._bottom
            self._bottom = max(self._bottom, self._row)
            self.follows_bar = b"\r" in lines[-1].rstrip(b"\r") or (len(lines) == 1 and self._is_bar)
            self._is_bar = False
            if not self._has_moved_up and not self._is_hidden:
                self._top = self._bottom = self._row
        _, returned, after = last.rpartition(b"\r")
        if returned:
            self._column, self._is_bar = 0, True
        if last:
            self.follows_bar = self._is_fresh = False
        if after.isascii():
            self._column += len(after) - sum(after.count(control) for control in (b"\0", b"\x07", b"\x08"))
        else:
            self._column += sum(map(cell_width, after.decode("utf-8", "replace")))


def cell_width(character: str) -> int:
    """Return how many columns of a terminal a character takes."""
    if combining(character) or character in "\u200b\u200c\u200d\ufe0e\ufe0f":
        return 0
    return 2 if east_asian_width(character) in "WF" else 1
