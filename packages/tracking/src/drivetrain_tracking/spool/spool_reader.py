"""Read a spool from any line on, while it is written; skip and count damaged lines."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from drivetrain_tracking.spool.files import open_regular
from drivetrain_tracking.spool.line import decode

_CHUNK_BYTES = 1 << 20


class SpooledRecord(NamedTuple):
    """A record of a spool."""

    end: int  # the offset of the next line in the file, in bytes, by which a reader goes on later
    record: dict[str, Any]


class SpoolReader:
    """A reader of the records after an offset in a spool. Not thread-safe."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.offset = offset
        self.num_damaged = 0
        self._path = path

    def read(self) -> Iterator[SpooledRecord]:
        """Yield the records that are complete by now; a line without its break is left for the next call."""
        try:
            file = open_regular(self._path)
        except FileNotFoundError:
            return
        try:
            rest = b""
            while chunk := os.pread(file, _CHUNK_BYTES, self.offset + len(rest)):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self.offset += len(line) + 1
                    record = decode(line)
                    if record is None:
                        self.num_damaged += 1
                    else:
                        yield SpooledRecord(self.offset, record)
        finally:
            os.close(file)
