"""Files that are hashed as they pass: written and read once, block by block, in bounded memory."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedReader, FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

import xxhash

from drivetrain_checkpoint.errors import CorruptCheckpointError

BLOCK_BYTES = 16 * 2**20
_BUFFER_BYTES = 2**20  # gathers small tensors into one system call; larger pieces pass it by


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """What the manifest says of a file.

    Attributes:
        name: Its name in the checkpoint's folder.
        size_bytes: Its size.
        checksums: The XXH3 (64 bit, hexadecimal) of each `BLOCK_BYTES` of it; the last block may be shorter.
    """

    name: str
    size_bytes: int
    checksums: tuple[str, ...]


class _BlockHash:
    """The checksum of each block of a stream that comes in pieces of any size."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self.checksums: list[str] = []
        self._hash = xxhash.xxh3_64()

    def room(self) -> int:
        """Bytes left in the block."""
        return BLOCK_BYTES - self.size_bytes % BLOCK_BYTES

    def update(self, piece: memoryview) -> bool:
        """Take a piece no longer than `room()`; whether it completed a block."""
        self._hash.update(piece)
        self.size_bytes += len(piece)
        if self.size_bytes % BLOCK_BYTES:
            return False
        self._end_block()
        return True

    def finish(self) -> bool:
        """End the last, shorter block; whether there was one."""
        if self.size_bytes % BLOCK_BYTES == 0:
            return False
        self._end_block()
        return True

    def _end_block(self) -> None:
        self.checksums.append(self._hash.hexdigest())
        self._hash.reset()


class HashedWriter:
    """A new file, hashed as it is written and on the disk when it is closed.

    Args:
        path: Where; it must not exist.
        on_block: Called after each block, as a sign of progress.
    """

    def __init__(self, path: Path, *, on_block: Callable[[], None] = lambda: None) -> None:
        self._path = path
        self._on_block = on_block
        self._hash = _BlockHash()
        self._file = path.open("xb", buffering=_BUFFER_BYTES)

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`, a buffer of single bytes."""
        view = memoryview(data)
        while len(view):
            piece, view = view[: self._hash.room()], view[self._hash.room() :]
            self._file.write(piece)
            if self._hash.update(piece):
                self._on_block()

    def record(self) -> FileRecord:
        """Force the file to the disk and say what it holds."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._hash.finish()
        return FileRecord(
            name=self._path.name,
            size_bytes=self._hash.size_bytes,
            checksums=tuple(self._hash.checksums),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


class HashedReader:
    """A file of a checkpoint, checked against its record as it is read.

    Args:
        path: Where it is.
        record: What the manifest says of it.
        on_block: Called after each block, as a sign of progress.

    Raises:
        CorruptCheckpointError: From any method, when the file differs from its record.
    """

    def __init__(
        self, path: Path, record: FileRecord, *, on_block: Callable[[], None] = lambda: None
    ) -> None:
        self._path = path
        self._record = record
        self._on_block = on_block
        self._hash = _BlockHash()
        check_size(path, record)
        self._file = BufferedReader(FileIO(path), _BUFFER_BYTES)

    def read_into(self, view: memoryview) -> None:
        """Fill `view`, a writable buffer of single bytes. What it holds is good once `finish` has returned."""
        while len(view):
            piece, view = view[: self._hash.room()], view[self._hash.room() :]
            if self._file.readinto(piece) != len(piece):
                raise CorruptCheckpointError(f"{self._path} ended early while it was read")
            if self._hash.update(piece):
                self._check_last_block()

    def read(self, size_bytes: int) -> bytes:
        """The next `size_bytes`."""
        data = bytearray(size_bytes)
        self.read_into(memoryview(data))
        return bytes(data)

    def finish(self) -> None:
        """Check that the whole file was read, and its last block."""
        if self._hash.size_bytes != self._record.size_bytes:
            raise CorruptCheckpointError(
                f"{self._path} holds {self._record.size_bytes} bytes, of which its header names "
                f"{self._hash.size_bytes}: it is not what was written"
            )
        if self._hash.finish():
            self._check_last_block()

    def _check_last_block(self) -> None:
        self._on_block()
        index = len(self._hash.checksums) - 1
        if self._hash.checksums[index] != self._record.checksums[index]:
            start, end = index * BLOCK_BYTES, self._hash.size_bytes
            raise CorruptCheckpointError(
                f"{self._path} is damaged between byte {start} and {end}: its checksum differs from the manifest's"
                "; load another checkpoint, or restore the file"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def check_size(path: Path, record: FileRecord) -> None:
    """Refuse a file that is missing or has another size than its record.

    Raises:
        CorruptCheckpointError: If so.
    """
    if not path.is_file():
        raise CorruptCheckpointError(f"{path} is missing, though the manifest lists it")
    size_bytes = path.stat().st_size
    if size_bytes != record.size_bytes:
        raise CorruptCheckpointError(
            f"{path} has {size_bytes} bytes, and the manifest says {record.size_bytes}: it is torn or was changed"
        )


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to the disk."""
    if os.name == "nt":  # Windows opens no folders; its file systems journal their entries
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
