"""Cut a stream of bytes into whole lines, mark them with their rank, and make them safe for a shared terminal.

Standard library only, as the keeper process imports it without site-packages.
"""

import re

# A line longer than this is handed on in pieces of about this size, so that a stream without newlines needs no more
# memory.
MAX_LINE_BYTES = 8 << 20

# Sequences that a terminal interprets: colours, which group 1 has, other CSI, OSC, and the shorter ones.
_SEQUENCE = re.compile(
    rb"(\x1b\[[0-?]*[ -/]*m)|\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-~]|\x1b"
    rb"|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f]"
)
_RESET = b"\x1b[0m"


class LineBuffer:
    """A buffer of the bytes of one stream that do not make a whole line yet."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size_bytes = 0

    def feed(self, data: bytes) -> bytes:
        """Add bytes, and return the lines that are whole now, each with its newline; empty if no line is."""
        end = data.rfind(b"\n") + 1
        if end:
            whole, rest = b"".join([*self._parts, data[:end]]), data[end:]
            self._parts, self._size_bytes = [], 0
        else:
            whole, rest = b"", data
        if rest:
            self._parts.append(rest)
            self._size_bytes += len(rest)
        if self._size_bytes < MAX_LINE_BYTES:
            return whole
        long = b"".join(self._parts)
        cut = whole_characters(long)
        self._parts, self._size_bytes = [long[cut:]], len(long) - cut
        return whole + long[:cut] + b"\n"

    def flush(self) -> bytes:
        """Return the unfinished last line with a newline added; empty without an unfinished line."""
        rest = b"".join(self._parts)
        self._parts, self._size_bytes = [], 0
        return rest + b"\n" if rest else b""


def whole_characters(data: bytes) -> int:
    """Return the length of `data` without a UTF-8 character that is cut at its end."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            break
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if back < needed else len(data)
    return len(data)


def mark(lines: bytes, prefix: bytes) -> bytes:
    """Put `prefix` before each of the whole lines."""
    if not prefix or not lines:
        return lines
    return b"".join((prefix, lines[:-1].replace(b"\n", b"\n" + prefix), b"\n"))


def for_terminal(lines: bytes) -> bytes:
    """Return whole lines in a form that a terminal may show between lines of other ranks.

    Colours stay and end with their line. Moves of the cursor, titles and other control characters are left out. If
    carriage returns have overwritten a line, as in a progress bar, only the line's last state is left.
    """
    if b"\r" not in lines and not _SEQUENCE.search(lines):
        return lines
    shown: list[bytes] = []
    for line in lines[:-1].split(b"\n"):
        states = [state for state in line.split(b"\r") if state.strip()]
        text = _SEQUENCE.sub(rb"\1", states[-1]) if states else b""
        shown.append(text + (_RESET if b"\x1b" in text else b"") + b"\n")
    return b"".join(shown)
