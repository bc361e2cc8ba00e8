"""Cut a stream of bytes into whole lines, mark them with their rank, and make them safe for a shared terminal.

Standard library only, as the keeper process imports it without site-packages.
"""

import re

# A line longer than this is handed on in pieces of about this size, so that a stream without newlines needs no more
# memory.
MAX_LINE_BYTES = 8 << 20

# Sequences that a terminal interprets: CSI, OSC, and the shorter ones.
_SEQUENCE = re.compile(
    rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-~]|\x1b"
    rb"|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f]"
)
_RESET = b"\x1b[0m"


class LineBuffer:
    """The bytes of one stream that do not yet make a whole line."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size_bytes = 0

    def feed(self, data: bytes) -> bytes:
        """Add bytes, and return the lines that are whole now, each with its newline; empty if there is none."""
        end = data.rfind(b"\n") + 1
        if not end:
            self._keep(data)
            return self._flush_long() if self._size_bytes >= MAX_LINE_BYTES else b""
        whole = b"".join([*self._parts, data[:end]])
        self._parts, self._size_bytes = [], 0
        self._keep(data[end:])
        return whole

    def flush(self) -> bytes:
        """Return the last line, which has no newline, with one; empty if there is none."""
        rest = b"".join(self._parts)
        self._parts, self._size_bytes = [], 0
        return rest + b"\n" if rest else b""

    def _keep(self, data: bytes) -> None:
        if data:
            self._parts.append(data)
            self._size_bytes += len(data)

    def _flush_long(self) -> bytes:
        rest = b"".join(self._parts)
        end = whole_characters(rest)
        self._parts, self._size_bytes = [], 0
        self._keep(rest[end:])
        return rest[:end] + b"\n"


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
    """Return whole lines as a terminal may show them between those of others.

    Colours stay and end with their line. Moves of the cursor, titles and other control characters are left out. Of a
    line that carriage returns have overwritten, as those of a progress bar, the last state is left.
    """
    if b"\r" not in lines and not _SEQUENCE.search(lines):
        return lines
    return b"".join(_tame(line) for line in lines[:-1].split(b"\n"))


def _tame(line: bytes) -> bytes:
    states = [state for state in line.split(b"\r") if state.strip()]
    text = states[-1] if states else b""
    if b"\x1b" not in text and not _SEQUENCE.search(text):
        return text + b"\n"
    shown = _SEQUENCE.sub(lambda found: found[0] if _is_colour(found[0]) else b"", text)
    return shown + (_RESET if b"\x1b" in shown else b"") + b"\n"


def _is_colour(sequence: bytes) -> bool:
    return sequence.startswith(b"\x1b[") and sequence.endswith(b"m")
