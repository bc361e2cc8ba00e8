"""Read and write files block by block, with a checksum for each block."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import xxhash

from drivetrain_checkpoint.errors import CorruptCheckpointError
from drivetrain_checkpoint.storage.place import Place, storage_of
from drivetrain_checkpoint.storage.threads import in_threads

BLOCK_BYTES = 16 * 2**20
_MOST_GATHERED_BYTES = 64 * 2**10  # shorter pieces are copied and written together
_MOST_VIEWS = 64  # views to read a block into directly; for more, one read and copies are cheaper


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """The record of a file in the manifest, with the XXH3 (64 bit, hexadecimal) of each block of `BLOCK_BYTES`."""

    name: str
    size_bytes: int
    checksums: tuple[str, ...]

    @classmethod
    def from_json(cls, name: str, content: Mapping[str, Any]) -> Self:
        """Return the record of a file from its fields in JSON."""
        return cls(name=name, size_bytes=content["size_bytes"], checksums=tuple(content["checksums"]))


class HashedWriter:
    """A writer that hashes a new file as it writes it; the file is complete and durable once `record` returns."""

    def __init__(self, path: Place, *, on_block: Callable[[], None] = lambda: None) -> None:
        self._path = path
        self._on_block = on_block
        self._size_bytes = 0  # written so far
        self._checksums: list[str] = []
        self._hash = xxhash.xxh3_64()  # of the block that is being written
        self._gathered = bytearray()
        self._file = storage_of(path).create(path)

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`, a buffer of single bytes."""
        if len(self._gathered) + len(data) > _MOST_GATHERED_BYTES:
            self._write_gathered()
        if len(data) <= _MOST_GATHERED_BYTES:
            self._gathered += data
        else:
            self._write(memoryview(data))

    def _write_gathered(self) -> None:
        gathered, self._gathered = self._gathered, bytearray()
        self._write(memoryview(gathered))

    def _write(self, view: memoryview) -> None:
        while len(view):
            room = BLOCK_BYTES - self._size_bytes % BLOCK_BYTES
            piece, view = view[:room], view[room:]
            with self._named():
                self._file.write(piece)
            self._hash.update(piece)
            self._size_bytes += len(piece)
            if len(piece) == room:
                self._end_block()
                self._on_block()

    def _end_block(self) -> None:
        self._checksums.append(self._hash.hexdigest())
        self._hash.reset()

    def record(self) -> FileRecord:
        """Make the file complete and durable, and return its record."""
        self._write_gathered()
        with self._named():
            self._file.finish()
        if self._size_bytes % BLOCK_BYTES:
            self._end_block()
        return FileRecord(name=self._path.name, size_bytes=self._size_bytes, checksums=tuple(self._checksums))

    @contextmanager
    def _named(self) -> Generator[None]:
        """Run the block; if it raises an `OSError` without a file name, as for a full disk, add the file's name."""
        try:
            yield
        except OSError as error:
            if error.filename is None and error.errno is not None:
                error.filename = str(self._path)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class HashedReader:
    """A reader of ranges of a file. Raises `CorruptCheckpointError` if a block of a range has another checksum."""

    def __init__(
        self, path: Place, record: FileRecord, *, on_block: Callable[[], None] = lambda: None
    ) -> None:
        self._path = path
        self._record = record
        self._on_block = on_block
        self._scratch: list[memoryview] = []  # buffers for blocks that are wanted in pieces, one per thread
        with self._checked_presence():
            self._file = storage_of(path).open_to_read(path)
        if (size_bytes := self._file.size_bytes) is not None and size_bytes != record.size_bytes:
            self._file.close()
            check_size(path, size_bytes, record)

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill buffers of single bytes with verified ranges of the file, in one pass over the blocks that hold them.

        A range is a pair: its first byte in the file, and the buffer to fill. The ranges are sorted by first byte.
        """
        blocks: dict[int, list[tuple[int, memoryview]]] = {}
        for at, view in ranges:
            if len(view):
                for index in range(at // BLOCK_BYTES, (at + len(view) - 1) // BLOCK_BYTES + 1):
                    blocks.setdefault(index, []).append((at, view))
        for _ in in_threads(self._fill_from_block, sorted(blocks.items()), most=self._file.num_readers):
            self._on_block()

    def read_all(self) -> bytes:
        """Return the content of the whole file."""
        content = bytearray(self._record.size_bytes)
        self.read_ranges([(0, memoryview(content))])
        return bytes(content)

    def _fill_from_block(self, block: "tuple[int, list[tuple[int, memoryview]]]") -> None:
        index, wanted = block
        start = index * BLOCK_BYTES
        end = min(start + BLOCK_BYTES, self._record.size_bytes)
        ranges: list[tuple[int, memoryview]] = []  # the parts of the ranges in this block
        for at, view in wanted:
            first, last = max(at, start), min(at + len(view), end)
            ranges.append((first, view[first - at : last - at]))
        # Ranges that cover the block without gaps or overlaps are read into directly.
        ends = [start, *(at + len(view) for at, view in ranges)]
        if len(ranges) <= _MOST_VIEWS and ends == [*(at for at, _ in ranges), end]:
            self._read_block(index, start, [view for _, view in ranges])
            return
        try:
            scratch = self._scratch.pop()
        except IndexError:  # other threads use all buffers
            scratch = memoryview(bytearray(min(BLOCK_BYTES, self._record.size_bytes)))
        whole = scratch[: end - start]
        self._read_block(index, start, [whole])
        for at, view in ranges:
            view[:] = whole[at - start : at - start + len(view)]
        self._scratch.append(scratch)

    def _read_block(self, index: int, start: int, views: Sequence[memoryview]) -> None:
        with self._checked_presence():
            size_bytes = self._file.read_at(start, views)
        end = start + sum(map(len, views))
        if size_bytes != end - start:
            raise CorruptCheckpointError(f"{self._path} ended early while it was read")
        checksum = xxhash.xxh3_64()
        for view in views:
            checksum.update(view)
        if checksum.hexdigest() != self._record.checksums[index]:
            raise CorruptCheckpointError(
                f"{self._path} is damaged between byte {start} and {end}: its checksum differs from "
                "the manifest's; load another checkpoint, or restore the file"
            )

    @contextmanager
    def _checked_presence(self) -> Generator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise CorruptCheckpointError(f"{self._path} is missing, though the manifest lists it") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def check_size(path: Place, size_bytes: int | None, record: FileRecord) -> None:
    """Check that a file exists and has the size in its record; raise `CorruptCheckpointError` if not."""
    if size_bytes is None:
        raise CorruptCheckpointError(f"{path} is missing, though the manifest lists it")
    if size_bytes != record.size_bytes:
        raise CorruptCheckpointError(
            f"{path} has {size_bytes} bytes, and the manifest says {record.size_bytes}: it is torn or was changed"
        )
