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

from drivetrain_dispatch.pages import Pages, bring, some_missing, together

PAGE = mmap.PAGESIZE
_DONTNEED = 4

ranges = st.lists(
    st.builds(Pages, st.integers(0, 40).map(lambda page: page * PAGE), st.integers(0, 5 * PAGE))
)


@given(ranges)
def test_pages_are_joined_where_they_touch(pages: list[Pages]) -> None:
    joined = together(pages)
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
    if not all(bring(*step) for step in pages.steps()):
        pytest.skip("a Linux before 5.14 cannot be asked for pages")
    assert not some_missing(pages)
    assert torch.equal(weight, torch.arange(3 << 20))
