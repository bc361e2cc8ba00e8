"""Verify a whole checkpoint: check every block of every file against its checksum, and report all damage."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue

import xxhash

from drivetrain_checkpoint.format.checksummed_io import BLOCK_BYTES, FileRecord
from drivetrain_checkpoint.format.manifest import read_manifest
from drivetrain_checkpoint.storage.place import Place, locate, storage_of
from drivetrain_checkpoint.storage.protocol import Reader
from drivetrain_checkpoint.storage.threads import in_threads


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptRange:
    """A damaged byte range in a file of a checkpoint.

    Attributes:
        file: The path of the file.
        start: The first byte that is damaged or cannot be verified.
        stop: The byte after the last damaged byte.
        why: The fault of the bytes.
    """

    file: Place
    start: int
    stop: int
    why: str

    def __str__(self) -> str:
        return f"{self.file}: bytes {self.start} to {self.stop}: {self.why}"


def verify_checkpoint(
    folder: Place | str, *, on_bytes: Callable[[int], None] = lambda _: None
) -> tuple[CorruptRange, ...]:
    """Read every file of a checkpoint and check every block against its checksum.

    A load verifies only the bytes it reads, and stops at the first fault. This function reports all damage.

    Args:
        folder: The checkpoint's folder or URL.
        on_bytes: A function called with the number of bytes read since the last call.

    Returns:
        The damaged byte ranges, by file and position; empty if the checkpoint is intact.

    Raises:
        CorruptCheckpointError: The manifest is missing or damaged, so that nothing can be verified.
    """
    place = locate(folder)
    manifest = read_manifest(place)
    sizes = storage_of(place).sizes_in(place)
    return tuple(
        damage
        for record in manifest.files.values()
        for damage in _in_file(place / record.name, sizes.get(record.name), record, on_bytes)
    )


def _in_file(
    path: Place, size_bytes: int | None, record: FileRecord, on_bytes: Callable[[int], None]
) -> Iterator[CorruptRange]:
    if size_bytes is None:
        yield CorruptRange(file=path, start=0, stop=record.size_bytes, why="the file is missing")
        return
    try:
        reader = storage_of(path).open_to_read(path)
    except OSError as error:
        yield CorruptRange(file=path, start=0, stop=record.size_bytes, why=f"cannot be read: {error}")
        return
    try:
        yield from _in_blocks(path, reader, size_bytes, record, on_bytes)
    finally:
        reader.close()
    if size_bytes > record.size_bytes:
        yield CorruptRange(file=path, start=record.size_bytes, stop=size_bytes, why="more than was written")


def _in_blocks(
    path: Place, reader: Reader, size_bytes: int, record: FileRecord, on_bytes: Callable[[int], None]
) -> Iterator[CorruptRange]:
    buffers: SimpleQueue[bytearray] = SimpleQueue()
    for _ in range(reader.num_readers):
        buffers.put(bytearray(min(BLOCK_BYTES, record.size_bytes)))

    def look(index: int) -> tuple[int, int, str | None]:
        start = index * BLOCK_BYTES
        stop = min(start + BLOCK_BYTES, record.size_bytes)
        if stop > size_bytes:  # a truncated block cannot be verified: its checksum covers all of it
            return start, stop, f"the file ends at byte {size_bytes}, and had {record.size_bytes}"
        buffer = buffers.get()
        view = memoryview(buffer)[: stop - start]
        fault = None
        try:
            if reader.read_at(start, [view]) != len(view):
                fault = "the file ended while it was read"
            elif xxhash.xxh3_64_hexdigest(view) != record.checksums[index]:
                fault = "the checksum differs from the manifest's"
        except OSError as error:
            fault = f"cannot be read: {error}"
        finally:
            buffers.put(buffer)
        return start, stop, fault

    for start, stop, why in in_threads(look, range(len(record.checksums)), most=reader.num_readers):
        on_bytes(stop - start)
        if why is not None:
            yield CorruptRange(file=path, start=start, stop=stop, why=why)
