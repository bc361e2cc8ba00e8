import mmap
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from drivetrain_memory import PeakRecord, record_peak

MB = 2**20
# A child that does what its stdin says: "take N" megabytes and give them back, "hold N", "end".
CHILD = """
import sys
held = []
print("ready", flush=True)
for line in sys.stdin:
    word, _, number = line.strip().partition(" ")
    if word == "end":
        break
    block = bytearray(b"x") * (int(number) * 2**20)
    if word == "hold":
        held.append(block)
    del block
    print("done", flush=True)
"""
resettable = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not Path("/proc/self/clear_refs").exists(),
    reason="wants Linux with a writable /proc: elsewhere no peak can be reset",
)


def fill(megabytes: int) -> mmap.mmap:
    """Take pages of the system's own, which go back at once: malloc may keep what earlier tests gave back."""
    pages = mmap.mmap(-1, megabytes * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages[:: mmap.PAGESIZE] = b"x" * (len(pages) // mmap.PAGESIZE)
    return pages


def test_a_peak_that_is_gone_again_is_seen() -> None:
    fill(1)
    with record_peak() as memory:
        before = memory.host_before_bytes
        block = fill(300)
        del block
    assert memory.host_bytes - before > 290 * MB


@resettable
def test_an_earlier_larger_peak_does_not_count() -> None:
    block = fill(400)
    del block
    with record_peak() as memory:
        block = fill(100)
        del block
    assert memory.host_source == "kernel"
    assert 90 * MB < memory.host_bytes - memory.host_before_bytes < 250 * MB


@resettable
def test_a_block_within_a_block_does_not_hide_the_outer_peak() -> None:
    with record_peak() as outer:
        block = fill(300)
        del block
        with record_peak() as inner:
            block = fill(100)
            del block
    assert outer.host_bytes - outer.host_before_bytes > 290 * MB
    assert inner.host_bytes - inner.host_before_bytes < 250 * MB


@resettable
def test_an_inner_peak_is_also_the_outer_blocks() -> None:
    with record_peak() as outer:
        with record_peak():
            block = fill(300)
            del block
        with record_peak():
            fill(1)
    assert outer.host_bytes - outer.host_before_bytes > 290 * MB


def test_inside_the_block_it_tells_the_peak_so_far_and_later_it_stays() -> None:
    with record_peak() as memory:
        block = fill(200)
        assert memory.host_bytes - memory.host_before_bytes > 190 * MB
        del block
    kept = memory.host_bytes
    fill(400)
    assert memory.host_bytes == kept


def test_one_measures_one_block_at_a_time() -> None:
    memory = record_peak()
    with memory, pytest.raises(RuntimeError, match="call record_peak\\(\\) again for a block within it"):
        memory.__enter__()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="wants a machine without an accelerator")
def test_without_an_accelerator_there_is_no_device_peak() -> None:
    with record_peak() as memory:
        pass
    assert memory.devices == ()
    assert (memory.device_bytes, memory.device_before_bytes, memory.device_reserved_bytes) == (
        None,
        None,
        None,
    )


class Child:
    """A child process that takes memory when it is told to."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-IS", "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid
        self._answer()

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        if line != "end":
            self._answer()

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.communicate("end\n")

    def _answer(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline()


@pytest.fixture
def start_child() -> Iterator[Callable[[], Child]]:
    children: list[Child] = []

    def start() -> Child:
        children.append(Child())
        return children[-1]

    yield start
    for child in children:
        child.end()


@resettable
def test_a_spike_of_5_ms_is_seen_within_2_percent() -> None:
    size = 500_000_000
    with record_peak() as peak:
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
        time.sleep(0.005)
        block.close()
    assert peak.host_source == "kernel"
    assert peak.host_bytes - peak.host_before_bytes == pytest.approx(size, rel=0.02)


@resettable
def test_a_child_counts_from_the_start_of_the_block(start_child: Callable[[], Child]) -> None:
    child = start_child()
    child.tell("take 200")  # before the block
    with record_peak() as peak:
        child.tell("take 60")
    (found,) = [one for one in peak.children if one.pid == child.pid]
    assert found.source == "kernel"
    assert not found.has_ended
    assert 59 * MB < found.peak_bytes - found.before_bytes < 90 * MB
    assert peak.host_total_bytes == peak.host_bytes + sum(one.peak_bytes for one in peak.children)


@resettable
def test_a_child_that_begins_in_the_block_counts_with_its_whole_life(
    start_child: Callable[[], Child],
) -> None:
    with record_peak() as outer:
        child = start_child()
        child.tell("take 120")
        with record_peak() as inner:
            child.tell("take 30")
    outer_child, inner_child = (
        next(one for one in peak.children if one.pid == child.pid) for peak in (outer, inner)
    )
    assert outer_child.before_bytes == 0
    assert outer_child.peak_bytes > 119 * MB
    assert inner_child.peak_bytes - inner_child.before_bytes < 60 * MB


@resettable
def test_a_child_that_ended_in_the_block_says_so(start_child: Callable[[], Child]) -> None:
    child = start_child()
    with record_peak() as peak:
        child.end()
    assert [one.has_ended for one in peak.children if one.pid == child.pid] == [True]


ENDED_CHILD = """
import subprocess, sys
from drivetrain_memory import record_peak
take = "import mmap; mmap.mmap(-1, %d * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)"
for megabytes in (20, 1200):
    with record_peak() as peak:
        subprocess.run([sys.executable, "-IS", "-c", take % megabytes], check=True)
    print(peak.ended_child_bytes)
"""


@resettable
@pytest.mark.slow
def test_a_large_child_that_began_and_ended_in_the_block_is_told_by_getrusage(python: str) -> None:
    done = subprocess.run([python, "-c", ENDED_CHILD], capture_output=True, text=True, check=True)
    small, large = done.stdout.split()
    assert small == "None"  # below the parent's own peak, whose mark a started program inherits
    assert int(large) > 1190 * MB


def test_children_can_be_left_out(start_child: Callable[[], Child]) -> None:
    start_child()
    with record_peak(children=False) as peak:
        pass
    assert peak.children == ()


def test_without_a_mark_that_can_be_reset_samples_tell_the_peak(tmp_path: Path) -> None:
    fill(400)  # an earlier, larger peak hides that of the block from getrusage
    with PeakRecord(proc=tmp_path) as peak:
        block = fill(100)
        time.sleep(0.5)  # on a busy machine, until the thread that samples runs
        del block
    assert peak.host_source == "sampled"
    assert 90 * MB < peak.host_bytes - peak.host_before_bytes < 250 * MB


def test_without_a_mark_that_can_be_reset_a_rise_of_the_highest_peak_is_exact(python: str) -> None:
    source = (
        "from pathlib import Path\nfrom drivetrain_memory import PeakRecord\n"
        "with PeakRecord(proc=Path('/nowhere')) as peak:\n"
        "    block = bytearray(b'x') * 800_000_000\n    del block\n"
        "print(peak.host_source, peak.host_bytes - peak.host_before_bytes)\n"
    )
    done = subprocess.run([python, "-c", source], capture_output=True, text=True, check=True)
    name, added = done.stdout.split()
    assert name == "getrusage"
    assert int(added) > 500_000_000


def test_before_its_block_a_measurement_is_empty() -> None:
    peak = record_peak()
    assert (peak.host_bytes, peak.host_before_bytes, peak.children, peak.devices) == (0, 0, (), ())
