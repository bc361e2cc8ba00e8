import sys
from pathlib import Path

import pytest
import torch

from drivetrain_memory import PeakMemory
from drivetrain_memory.resident_memory import peak_resident_bytes, reset_peak, resident_bytes

MB = 2**20
resettable = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not Path("/proc/self/clear_refs").exists(),
    reason="wants Linux with a writable /proc: elsewhere no peak can be reset",
)


def fill(megabytes: int) -> bytearray:
    return bytearray(b"x") * (megabytes * MB)


def test_a_peak_that_is_gone_again_is_seen() -> None:
    fill(1)
    with PeakMemory() as memory:
        before = memory.host_before_bytes
        block = fill(300)
        del block
    assert memory.host_bytes - before > 290 * MB


@resettable
def test_an_earlier_larger_peak_does_not_count() -> None:
    block = fill(400)
    del block
    with PeakMemory() as memory:
        block = fill(100)
        del block
    assert memory.host_is_exact
    assert 90 * MB < memory.host_bytes - memory.host_before_bytes < 250 * MB


@resettable
def test_a_block_within_a_block_does_not_hide_the_outer_peak() -> None:
    with PeakMemory() as outer:
        block = fill(300)
        del block
        with PeakMemory() as inner:
            block = fill(100)
            del block
    assert outer.host_bytes - outer.host_before_bytes > 290 * MB
    assert inner.host_bytes - inner.host_before_bytes < 250 * MB


@resettable
def test_an_inner_peak_is_also_the_outer_blocks() -> None:
    with PeakMemory() as outer:
        with PeakMemory():
            block = fill(300)
            del block
        with PeakMemory():
            fill(1)
    assert outer.host_bytes - outer.host_before_bytes > 290 * MB


def test_inside_the_block_it_tells_the_peak_so_far_and_later_it_stays() -> None:
    with PeakMemory() as memory:
        block = fill(200)
        assert memory.host_bytes - memory.host_before_bytes > 190 * MB
        del block
    kept = memory.host_bytes
    fill(400)
    assert memory.host_bytes == kept


def test_one_measures_one_block_at_a_time() -> None:
    memory = PeakMemory()
    with memory, pytest.raises(RuntimeError, match="make another for a block within it"):
        memory.__enter__()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="wants a machine without an accelerator")
def test_without_an_accelerator_there_is_no_device_peak() -> None:
    with PeakMemory() as memory:
        pass
    assert (memory.device_bytes, memory.device_before_bytes, memory.device_reserved_bytes) == (
        None,
        None,
        None,
    )


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a CUDA device")
def test_the_device_peak_is_that_of_the_tensors() -> None:
    kept = torch.zeros(10 * MB, dtype=torch.uint8, device="cuda")
    with PeakMemory() as outer:
        block = torch.zeros(100 * MB, dtype=torch.uint8, device="cuda")
        del block
        with PeakMemory() as inner:
            block = torch.zeros(50 * MB, dtype=torch.uint8, device="cuda")
            del block
    assert outer.device_bytes is not None
    assert inner.device_bytes is not None
    assert outer.device_before_bytes is not None
    assert outer.device_bytes - outer.device_before_bytes == 100 * MB
    assert inner.device_bytes - outer.device_before_bytes == 50 * MB
    assert (outer.device_reserved_bytes or 0) >= outer.device_bytes
    del kept


def test_counters_are_in_bytes_and_agree() -> None:
    reset_peak()
    assert resident_bytes() > 10 * MB
    assert peak_resident_bytes() >= 0.9 * resident_bytes()


def test_before_its_block_a_measurement_is_empty() -> None:
    memory = PeakMemory()
    assert (memory.host_bytes, memory.host_before_bytes, memory.host_is_exact) == (0, 0, False)
