import ctypes
import mmap
import os
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from drivetrain_dispatch.offload.pages import Pages, can_release, merge, populate, release, some_missing
from drivetrain_weights import MappedFile

PAGE = mmap.PAGESIZE
_DONTNEED = 4

ranges = st.lists(
    st.builds(Pages, st.integers(0, 40).map(lambda page: page * PAGE), st.integers(0, 5 * PAGE))
)


@given(ranges)
def test_pages_are_joined_where_they_touch(pages: list[Pages]) -> None:
    joined = merge(pages)
    assert _numbers(joined) == _numbers(pages)
    for one, other in pairwise(joined):
        assert one.first + one.size_bytes < other.first


def _numbers(pages: list[Pages]) -> set[int]:
    return {
        page for one in pages for page in range(one.first // PAGE, -(-(one.first + one.size_bytes) // PAGE))
    }


@given(st.integers(0, 50 << 20))
def test_steps_are_all_of_them_in_order(size_bytes: int) -> None:
    at = 7 * PAGE
    for address, step_bytes in Pages(at, size_bytes).steps():
        assert address == at
        assert 0 < step_bytes <= 8 << 20
        at += step_bytes
    assert at == 7 * PAGE + size_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which pages are in memory")
def test_pages_that_left_memory_are_missed_and_brought_back(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file({"weight": torch.arange(3 << 20)}, file)
    with safe_open(file, framework="pt") as reader:
        weight = reader.get_tensor("weight")
    pages = Pages.of(weight)
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        # Pages that are mapped stay in the cache.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(pages.first), ctypes.c_size_t(pages.size_bytes), _DONTNEED)
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if not some_missing(pages):
        pytest.skip("this file system keeps its pages")
    if not all(populate(*step) for step in pages.steps()):
        pytest.skip("a Linux before 5.14 cannot be asked for pages")
    assert not some_missing(pages)
    assert torch.equal(weight, torch.arange(3 << 20))


def resident(tensor: torch.Tensor) -> int:
    """How many of its pages this process has."""
    pages = Pages.of(tensor)
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        file.seek(pages.first // PAGE * 8)
        entries = bytearray(file.read(8 * -(-pages.size_bytes // PAGE)))
    return int((torch.frombuffer(entries, dtype=torch.int64) < 0).sum())


@given(st.sets(st.integers(0, (1 << 20) - 1), max_size=3))
def test_what_was_written_is_never_lost(tmp_path_factory: pytest.TempPathFactory, written: set[int]) -> None:
    if not can_release():
        pytest.skip("asks Linux which pages were written to")
    file = tmp_path_factory.mktemp("pages") / "weights.safetensors"
    save_file({"weight": torch.arange(1 << 20)}, file)
    with safe_open(file, framework="pt") as reader:
        weights = reader.get_tensor("weight")
    expected = torch.arange(1 << 20)
    for at in written:
        weights[at] = expected[at] = -1
    for begin in range(0, 1 << 20, 1 << 18):
        part = slice(begin, begin + (1 << 18))
        released = release(Pages.of(weights[part]))
        neighbours = range(begin - PAGE // 8, begin + (1 << 18) + PAGE // 8)
        assert released or any(at in neighbours for at in written)
    assert torch.equal(weights, expected)


def test_a_shared_file_keeps_what_was_written(tmp_path: Path) -> None:
    if not can_release():
        pytest.skip("asks Linux which pages were written to")
    shared = torch.from_file(str(tmp_path / "file"), shared=True, size=1 << 16, dtype=torch.int64)
    shared.copy_(torch.arange(1 << 16))
    release(Pages.of(shared))
    assert torch.equal(shared, torch.arange(1 << 16))


def test_no_pages_are_released() -> None:
    assert release(Pages(0, 0)) == can_release()


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which pages are in memory")
def test_a_file_is_opened_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    save_file({f"{index}": torch.zeros(1 << 20) for index in range(16)}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    opened = MappedFile(path)
    pages = [Pages.of(opened.tensor(name)) for name in opened.in_order]
    if not some_missing(pages[8]):
        pytest.skip("this file system keeps its pages")
    # The header is there, and what the system reads ahead of itself.
    assert all(map(some_missing, pages[4:]))
    assert torch.equal(opened.tensor("8"), torch.zeros(1 << 20))
