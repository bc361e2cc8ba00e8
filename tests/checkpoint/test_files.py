from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_checkpoint.errors import CorruptCheckpointError
from drivetrain_checkpoint.files import BLOCK_BYTES, FileRecord, HashedReader, HashedWriter, check_size


def write(path: Path, *pieces: bytes) -> FileRecord:
    with HashedWriter(path) as writer:
        for piece in pieces:
            writer.write(piece)
        return writer.record()


def read_all(path: Path, record: FileRecord) -> bytes:
    with HashedReader(path, record) as reader:
        content = reader.read(record.size_bytes)
        reader.finish()
    return content


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


@given(st.lists(st.binary(max_size=50), max_size=5), st.integers(min_value=1, max_value=60))
def test_what_was_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], size: int
) -> None:
    path = tmp_path_factory.mktemp("files") / "file"
    record = write(path, *pieces)
    content = b"".join(pieces)
    with HashedReader(path, record) as reader:
        read = b"".join(reader.read(min(size, len(content) - at)) for at in range(0, len(content), size))
        reader.finish()
    assert read == content
    assert record.size_bytes == len(content)


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


def test_a_file_that_is_not_read_to_its_end_is_not_taken_for_good(tmp_path: Path) -> None:
    record = write(tmp_path / "file", b"abcdef")
    with HashedReader(tmp_path / "file", record) as reader:
        reader.read(3)
        with pytest.raises(CorruptCheckpointError, match="holds 6 bytes, of which its header names 3"):
            reader.finish()


def test_size_and_presence_are_checked(tmp_path: Path) -> None:
    record = write(tmp_path / "file", b"abcdef")
    check_size(tmp_path / "file", record)
    (tmp_path / "file").write_bytes(b"abc")
    with pytest.raises(CorruptCheckpointError, match="file has 3 bytes, and the manifest says 6"):
        HashedReader(tmp_path / "file", record)
    (tmp_path / "file").unlink()
    with pytest.raises(CorruptCheckpointError, match="file is missing"):
        check_size(tmp_path / "file", record)


def test_an_existing_file_is_never_written_over(tmp_path: Path) -> None:
    write(tmp_path / "file", b"first")
    with pytest.raises(FileExistsError, match="file"):
        HashedWriter(tmp_path / "file")
