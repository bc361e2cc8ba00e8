"""Read what a `.wandb` file holds while it grows: LevelDB's log format, with messages of wandb."""

import zlib
from collections.abc import Iterator
from pathlib import Path

from drivetrain_tracking.platforms.compat import wandb_row

_BLOCK_BYTES = 32 * 1024
_FILE_HEADER_BYTES = 7  # wandb's own: a name and a version
_HEADER_BYTES = 7  # of a chunk: checksum (4), length (2), kind (1), little-endian
_LAST_CHUNKS = (1, 4)  # the kinds FULL and LAST; FIRST is 2, MIDDLE 3


class WandbFile:
    """A reader of one `.wandb` file, which continues where its last read ended. Not thread-safe.

    Args:
        path: The file; it may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = _FILE_HEADER_BYTES
        self._begun = b""  # the message whose last chunk was not read yet

    def times(self) -> list[float]:
        """Return the times of the history's rows that were added since the last call, in seconds."""
        rows = [wandb_row(message) or {} for message in self._messages()]
        return [float(row["_timestamp"]) for row in rows if "_timestamp" in row]

    def _messages(self) -> Iterator[bytes]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        at = 0
        while True:
            left = _BLOCK_BYTES - self._offset % _BLOCK_BYTES
            if left < _HEADER_BYTES:  # the rest of a block, too short for a header
                at, self._offset = at + left, self._offset + left
            chunk = _chunk(data, at)
            if chunk is None:
                return
            kind, content = chunk
            size = _HEADER_BYTES + len(content)
            at, self._offset = at + size, self._offset + size
            self._begun += content
            if kind in _LAST_CHUNKS:
                message, self._begun = self._begun, b""
                yield message


def _chunk(data: bytes, at: int) -> tuple[int, bytes] | None:
    """Return the kind and content of the chunk at an offset, or None if it is not whole yet."""
    if len(data) < at + _HEADER_BYTES:
        return None
    checksum = int.from_bytes(data[at : at + 4], "little")
    size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
    content = data[at + _HEADER_BYTES : at + _HEADER_BYTES + size]
    if kind == 0 or len(content) < size or zlib.crc32(content, zlib.crc32(bytes([kind]))) != checksum:
        return None
    return kind, content
