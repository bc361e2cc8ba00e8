import ctypes
import errno
import fcntl
import mmap
import os
import random
import resource
from collections.abc import Generator
from io import FileIO
from pathlib import Path
from threading import Event

import pytest

from drivetrain_checkpoint.format.checksummed_io import HashedWriter
from drivetrain_checkpoint.storage.direct_writer import BUFFER_BYTES as BUFFER
from drivetrain_checkpoint.storage.direct_writer import DiskWriter
from drivetrain_checkpoint.storage.threads import Task

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


def passes_its_cache(directory: Path) -> bool:
    """Whether the file system lets a page by its cache; one in memory says so and has nothing else."""
    path = directory / "probe"
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        except OSError:
            return False
        try:
            os.write(descriptor, page)
        finally:
            os.close(descriptor)
    return cached_bytes(path) == 0


def test_the_cache_is_left_to_others(tmp_path: Path) -> None:
    if not passes_its_cache(tmp_path):
        pytest.skip("this file system writes through its cache")
    write(tmp_path / "file", bytes(4 * BUFFER + 1))
    assert cached_bytes(tmp_path / "file") <= mmap.PAGESIZE
    (tmp_path / "usual").write_bytes(bytes(4 * BUFFER + 1))
    assert cached_bytes(tmp_path / "usual") > 2 * BUFFER


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("asked", [True, False])
def test_a_file_system_that_knows_its_cache_alone_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, asked: bool
) -> None:
    """It refuses when it is asked, or only when something is written."""
    set_flags, put = fcntl.fcntl, FileIO.write

    def answer(file: FileIO, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return set_flags(file, command, flags)

    class Refusing(FileIO):
        def write(self, data: memoryview) -> int:
            if set_flags(self, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(code, os.strerror(code))
            return put(self, data[: len(data) // 2 + 1])  # and takes a part of what it is given

    if asked:
        monkeypatch.setattr(fcntl, "fcntl", answer)
    else:
        monkeypatch.setattr(Path, "open", lambda path, mode, buffering: Refusing(path, mode))
    content = random.Random(1).randbytes(2 * BUFFER + 5)
    write(tmp_path / "file", content, pieces=7)
    monkeypatch.undo()
    assert (tmp_path / "file").read_bytes() == content


@pytest.fixture
def _small_files() -> Generator[None]:
    """No file may have more than two and a half buffers."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 * BUFFER // 2, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("_small_files")
@pytest.mark.parametrize("size", [3 * BUFFER, 3 * BUFFER + 5, 9 * BUFFER])
def test_a_write_that_fails_is_told_by_the_end_and_the_file_named(tmp_path: Path, size: int) -> None:
    def write_all() -> None:
        with HashedWriter(tmp_path / "weights") as writer:
            writer.write(bytearray(size))
            writer.record()

    with pytest.raises(OSError, match=r"File too large: '.*/weights'"):
        write_all()


def test_it_is_let_go_of_only_when_nothing_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes while the next buffer waits for the one that is being written."""
    begun, goes_on = Event(), Event()

    class Slow(FileIO):
        def write(self, data: memoryview) -> int:
            begun.set()
            assert goes_on.wait(60)
            return super().write(data)

    def interrupted(_: Task[None]) -> None:
        assert begun.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "open", lambda path, mode, buffering: Slow(path, mode))
    writer = DiskWriter(tmp_path / "file")
    writer.write(memoryview(bytearray(BUFFER)))
    with monkeypatch.context() as patch:
        patch.setattr(Task, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.finish()
    closing = Task(writer.close)
    goes_on.set()
    closing.result()
    monkeypatch.undo()
    assert (tmp_path / "file").stat().st_size == BUFFER
