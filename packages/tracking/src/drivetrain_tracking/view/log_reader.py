"""Find the logs of runs, and read each log in chunks while it is written; detect a replaced file."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain_tracking.spool.files import open_regular
from drivetrain_tracking.spool.line import LOG_NAME, has_checksum, is_complete

_MAX_DEPTH = 4  # folders below a given one: a sweep of groups of runs, not the files of a checkpoint
# The parser holds the interpreter for about 10 ms then, and requests are answered between.
_CHUNK_BYTES = 1 << 20
_MOST_LINE_BYTES = 1 << 26
_HEAD_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPlace:
    """The place of a run's log."""

    label: str  # unique among the places of one search: the folder's path below the one that was given
    path: Path


def find_logs(folders: Sequence[Path]) -> tuple[LogPlace, ...]:
    """Find the logs in folders and up to four levels below them, each once, sorted by label; follow no links."""
    found: dict[Path, str] = {}
    for folder in folders:
        root = folder.absolute()
        for inside, below, files in os.walk(root):
            path = Path(inside).relative_to(root)
            if LOG_NAME in files:
                found.setdefault(root / path / LOG_NAME, str(path) if path.parts else root.name or str(root))
            # Assigning to the list tells os.walk where to go on.
            is_deepest = len(path.parts) >= _MAX_DEPTH
            below[:] = [] if is_deepest else sorted(name for name in below if not name.startswith("."))
    labels = list(found.values())
    places = [
        LogPlace(label=label if labels.count(label) == 1 else str(path.parent), path=path)
        for path, label in found.items()
    ]
    return tuple(sorted(places, key=lambda place: (place.label, place.path)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogChunk:
    """The lines of a log that one read returned."""

    records: Sequence[dict[str, Any]] = ()  # of whole lines, in order; a checksum is a member `crc`
    num_damaged: int = 0
    is_replaced: bool = False  # the log is another file, or was cut: what was read of it is void
    is_last: bool = True  # no whole line is left to read at present


class LogReader:
    """A reader of a log from its beginning. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self.offset = 0
        self.size_bytes = 0
        self._path = path
        self._identity: tuple[int, int] | None = None
        self._head = b""
        self._chunk_bytes = _CHUNK_BYTES

    def read(self) -> LogChunk:
        """Read the next whole lines, about a megabyte; a line without its break is left for the next call."""
        file = open_regular(self._path)
        try:
            status = os.fstat(file)
            identity = (status.st_dev, status.st_ino)
            before, self._identity, self.size_bytes = self._identity, identity, status.st_size
            # A file that only grew is the same.
            if before is not None and (
                before != identity
                or status.st_size < self.offset
                or os.pread(file, len(self._head), 0) != self._head
            ):
                self.offset, self._head, self._chunk_bytes = 0, b"", _CHUNK_BYTES
                return LogChunk(is_replaced=True, is_last=False)
            if len(self._head) < _HEAD_BYTES:
                self._head = os.pread(file, _HEAD_BYTES, 0)
            chunk = os.pread(file, self._chunk_bytes, self.offset)
        finally:
            os.close(file)
        end = chunk.rfind(b"\n") + 1
        if not end:
            if len(chunk) < self._chunk_bytes:
                return LogChunk()
            if self._chunk_bytes < _MOST_LINE_BYTES:  # a line is longer than the chunk: read more next time
                self._chunk_bytes *= 4
                return LogChunk(is_last=False)
            self.offset += len(chunk)  # pass over a line that never ends
            return LogChunk(num_damaged=1, is_last=False)
        self.offset += end
        self._chunk_bytes = _CHUNK_BYTES
        records, num_damaged = parse_lines(chunk[: end - 1].split(b"\n"))
        return LogChunk(records=records, num_damaged=num_damaged, is_last=self.offset >= self.size_bytes)


def parse_lines(lines: Sequence[bytes]) -> tuple[list[dict[str, Any]], int]:
    """Return the records of lines, and the number of lines without one. Checksums must match; old lines have none."""
    marked = list(filter(has_checksum, lines))
    whole = list(filter(is_complete, marked))
    # As one JSON array they are parsed three times as fast. Lines that no checksum vouches for are parsed one by one:
    # two broken ones could be valid JSON together.
    found = _parse(b"[%b]" % b",".join(whole)) if len(marked) == len(lines) else None
    if found is None or len(found) != len(whole) or any(type(record) is not dict for record in found):
        found = [_parse(line) for line in lines if is_complete(line) or not has_checksum(line)]
    records: list[dict[str, Any]] = [record for record in found if isinstance(record, dict)]
    return records, len(lines) - len(records)


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: brackets nested thousands of levels deep
        return None
