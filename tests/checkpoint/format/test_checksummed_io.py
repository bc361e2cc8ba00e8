import errno
import random
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain_checkpoint.errors import CorruptCheckpointError
from drivetrain_checkpoint.format.checksummed_io import (
    BLOCK_BYTES,
    FileRecord,
    HashedReader,
    HashedWriter,
    check_size,
)
from drivetrain_checkpoint.storage.direct_writer import DiskWriter


def write(path: Path, *pieces: bytes) -> FileRecord:
    with HashedWriter(path) as writer:
        for piece in pieces:
            writer.write(piece)
        return writer.record()


def read_all(path: Path, record: FileRecord) -> bytes:
    with HashedReader(path, record) as reader:
        return reader.read_all()


def test_the_checksums_are_those_of_the_blocks_however_the_pieces_fall(tmp_path: Path) -> None:
    content = bytes(range(256)) * ((2 * BLOCK_BYTES + 512) // 256)
    whole = write(tmp_path / "whole", content)
    pieces = write(tmp_path / "pieces", content[:7], content[7 : BLOCK_BYTES + 9], content[BLOCK_BYTES + 9 :])
    assert pieces.checksums == whole.checksums
    assert whole.checksums == tuple(
        xxhash.xxh3_64_hexdigest(content[start : start + BLOCK_BYTES])
        for start in range(0, len(content), BLOCK_BYTES)
    )
    assert (tmp_path / "pieces").read_bytes() == content


@given(st.lists(st.binary(max_size=50), max_size=5), st.data())
def test_what_was_written_is_read_wherever_one_begins(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("files") / "file"
    record = write(path, *pieces)
    content = b"".join(pieces)
    assert read_all(path, record) == content
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(start, len(content)))
    part = bytearray(end - start)
    with HashedReader(path, record) as reader:
        reader.read_ranges([(start, memoryview(part))])
    assert part == content[start:end]


def test_ranges_that_cross_blocks_and_each_other_are_filled_in_one_pass(tmp_path: Path) -> None:
    content = random.Random(0).randbytes(3 * BLOCK_BYTES + 100)
    record = write(tmp_path / "file", content)
    blocks: list[int] = []
    ranges = [(5, 10), (7, BLOCK_BYTES), (BLOCK_BYTES - 3, 2 * BLOCK_BYTES + 50), (3 * BLOCK_BYTES + 99, 1)]
    parts = [bytearray(size) for _, size in ranges]
    with HashedReader(tmp_path / "file", record, on_block=lambda: blocks.append(1)) as reader:
        reader.read_ranges(
            [(start, memoryview(part)) for (start, _), part in zip(ranges, parts, strict=True)]
        )
    assert [bytes(part) for part in parts] == [content[start : start + size] for start, size in ranges]
    assert len(blocks) == 4


@given(st.lists(st.tuples(st.booleans(), st.integers(1, BLOCK_BYTES)), min_size=1, max_size=6))
@settings(max_examples=15)
def test_neighbours_and_gaps_are_read_alike(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[tuple[bool, int]]
) -> None:
    path = tmp_path_factory.mktemp("files") / "file"
    content = random.Random(0).randbytes(sum(size for _, size in sizes))
    record = write(path, content)
    starts = [sum(size for _, size in sizes[:number]) for number in range(len(sizes))]
    wanted = [(start, size) for start, (is_wanted, size) in zip(starts, sizes, strict=True) if is_wanted]
    parts = [bytearray(size) for _, size in wanted]
    with HashedReader(path, record) as reader:
        reader.read_ranges(
            [(start, memoryview(part)) for (start, _), part in zip(wanted, parts, strict=True)]
        )
    assert parts == [content[start : start + size] for start, size in wanted]


def test_blocks_that_nobody_wants_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    record = write(path, bytes(3 * BLOCK_BYTES))
    with path.open("r+b") as file:
        file.write(b"\1")  # block 0 is damaged
    part = bytearray(10)
    with HashedReader(path, record) as reader:
        reader.read_ranges([(BLOCK_BYTES + 5, memoryview(part))])
        with pytest.raises(CorruptCheckpointError, match="between byte 0 and"):
            reader.read_ranges([(BLOCK_BYTES - 5, memoryview(part))])


def test_progress_is_told_block_by_block(tmp_path: Path) -> None:
    blocks: list[int] = []
    with HashedWriter(tmp_path / "file", on_block=lambda: blocks.append(1)) as writer:
        writer.write(bytes(3 * BLOCK_BYTES + 1))
    assert len(blocks) == 3


@pytest.mark.parametrize("position", [0, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 99])
def test_a_changed_byte_is_found_and_its_block_named(tmp_path: Path, position: int) -> None:
    path = tmp_path / "file"
    record = write(path, bytes(BLOCK_BYTES + 100))
    with path.open("r+b") as file:
        file.seek(position)
        file.write(b"\1")
    start = position // BLOCK_BYTES * BLOCK_BYTES
    with pytest.raises(CorruptCheckpointError, match=rf"file is damaged between byte {start} and"):
        read_all(path, record)


def test_size_and_presence_are_checked(tmp_path: Path) -> None:
    record = write(tmp_path / "file", b"abcdef")
    check_size(tmp_path / "file", 6, record)
    (tmp_path / "file").write_bytes(b"abc")
    with pytest.raises(CorruptCheckpointError, match="file has 3 bytes, and the manifest says 6"):
        HashedReader(tmp_path / "file", record)
    (tmp_path / "file").unlink()
    with pytest.raises(CorruptCheckpointError, match="file is missing"):
        HashedReader(tmp_path / "file", record)


def test_an_existing_file_is_never_written_over(tmp_path: Path) -> None:
    write(tmp_path / "file", b"first")
    with pytest.raises(FileExistsError, match="file"):
        HashedWriter(tmp_path / "file")


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(DiskWriter, "write", fill)
    with (
        HashedWriter(tmp_path / "weights") as writer,
        pytest.raises(OSError, match=r"No space left on device: '.*/weights'"),
    ):
        writer.write(bytes(2**20))
