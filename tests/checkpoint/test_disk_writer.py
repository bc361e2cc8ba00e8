import ctypes
import errno
import fcntl
import mmap
import random
from pathlib import Path

import pytest

from drivetrain_checkpoint.disk_writer import DiskWriter

BUFFER = 8 * 2**20
SIZES = [0, 1, 4095, 4096, 4097, BUFFER - 1, BUFFER, BUFFER + 1, 3 * BUFFER + 4096, 3 * BUFFER + 777]


def write(path: Path, content: bytes, pieces: int = 1) -> None:
    writer = DiskWriter(path)
    view = memoryview(bytearray(content))
    cuts = sorted(random.Random(len(content)).randrange(len(view) + 1) for _ in range(pieces - 1))
    for start, end in zip([0, *cuts], [*cuts, len(view)], strict=True):
        writer.write(view[start:end])
    writer.finish()
    writer.close()


def cached_bytes(path: Path) -> int:
    """How much of a file is in the operating system's cache."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(mapped)))
        assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(len(mapped)), pages) == 0
        return mmap.PAGESIZE * sum(page & 1 for page in pages)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("pieces", [1, 50])
def test_the_file_is_what_was_written(tmp_path: Path, size: int, pieces: int) -> None:
    content = random.Random(0).randbytes(size)
    write(tmp_path / "file", content, pieces)
    assert (tmp_path / "file").read_bytes() == content


def test_what_cannot_be_written_to_is_taken_too(tmp_path: Path) -> None:
    writer = DiskWriter(tmp_path / "file")
    writer.write(memoryview(b"text"))
    writer.finish()
    writer.close()
    assert (tmp_path / "file").read_bytes() == b"text"


def test_what_was_given_may_change_afterwards(tmp_path: Path) -> None:
    writer, data = DiskWriter(tmp_path / "file"), bytearray(BUFFER)
    for value in b"abc":
        data[:] = bytes([value]) * BUFFER
        writer.write(memoryview(data))
    writer.finish()
    writer.close()
    assert (tmp_path / "file").read_bytes() == b"a" * BUFFER + b"b" * BUFFER + b"c" * BUFFER


def test_the_cache_is_left_to_others(tmp_path: Path) -> None:
    writer = DiskWriter(tmp_path / "probe")
    writer.close()
    if not writer._passes_cache:
        pytest.skip("this file system writes through its cache")
    write(tmp_path / "file", bytes(4 * BUFFER + 1))
    assert cached_bytes(tmp_path / "file") <= 4096
    (tmp_path / "usual").write_bytes(bytes(4 * BUFFER + 1))
    assert cached_bytes(tmp_path / "usual") > 4 * BUFFER


@pytest.mark.parametrize("refused", [fcntl.F_SETFL, None])
def test_a_file_system_that_knows_its_cache_alone_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int | None
) -> None:
    """It refuses when it is asked, or only when something is written."""
    asked = fcntl.fcntl

    def answer(file, command, flags=0):
        if command == refused:
            raise OSError(errno.EINVAL, "Invalid argument")
        return asked(file, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", answer)
    if refused is None:  # such as one that asks for more than 4096 bytes: here it is less
        monkeypatch.setattr("drivetrain_checkpoint.disk_writer._BUFFER_BYTES", 1000)
    content = random.Random(1).randbytes(2 * BUFFER + 5 if refused else 4321)
    write(tmp_path / "file", content, pieces=7)
    assert (tmp_path / "file").read_bytes() == content


def test_a_write_that_fails_is_told_at_the_next_call(tmp_path: Path) -> None:
    writer = DiskWriter(tmp_path / "file")
    writer._file.close()
    writer.write(memoryview(bytearray(BUFFER)))
    with pytest.raises(ValueError, match="closed file"):
        writer.finish()
    writer.close()
