"""The memory of a process at a step, by place, in some 50 microseconds, and the measurements of many steps."""

import gc
import multiprocessing
import sys
import tracemalloc
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from drivetrain_memory.compat import host_allocator_bytes
from drivetrain_memory.leaks.growth import LEAST_POINTS, Growth, fit_growth
from drivetrain_memory.system_heap import heap_use

_STATUS = Path("/proc/self/status")
_MOST_SAMPLES = 512
# The smallest growth over the fitted points that raises suspicion, by measurement: bytes, or blocks of Python.
_LEAST_TOTALS = {
    "heap_used": 32 << 10,
    "python_blocks": 100,
    "resident": 8 << 20,
    "device_allocated": 4096,
    "pinned": 1,
    "children": 1 << 20,
}
SUSPICIOUS = frozenset(_LEAST_TOTALS)
_NAMES = ("step", *_LEAST_TOTALS, "heap_free", "device_reserved")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """The memory of this process at one step, in bytes; None for a number that the system does not report."""

    step: int
    resident: int  # without pages of files, where the system tells them apart
    heap_used: int | None  # allocated in the system's heap, CPU tensors included
    heap_free: int | None  # in that heap, between the bytes in use
    python_blocks: int
    device_allocated: int = 0
    device_reserved: int = 0
    pinned: int = 0
    children: Mapping[int, int] = field(default_factory=dict[int, int])  # resident, by process id


def measure(step: int) -> MemorySample:
    """Measure the memory of this process and of its children."""
    heap = heap_use()
    has_device = torch.accelerator.current_accelerator(check_available=True) is not None
    traces = tracemalloc.get_tracemalloc_memory() if tracemalloc.is_tracing() else 0
    return MemorySample(
        step=step,
        resident=own_resident_bytes() - traces,
        heap_used=None if heap is None else heap.used_bytes - traces,
        heap_free=None if heap is None else heap.free_bytes,
        python_blocks=sys.getallocatedblocks(),
        device_allocated=torch.accelerator.memory_allocated() if has_device else 0,
        device_reserved=torch.accelerator.memory_reserved() if has_device else 0,
        pinned=host_allocator_bytes(),
        children=children_bytes(),
    )


def measure_collected(step: int) -> MemorySample:
    """Collect garbage, then measure."""
    gc.collect()
    return measure(step)


def own_resident_bytes() -> int:
    """Return the resident bytes that no file backs; all resident bytes if the system does not tell them apart."""
    if _STATUS.exists():
        with _STATUS.open() as lines:
            for line in lines:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
    return int(psutil.Process().memory_info().rss)


def children_bytes() -> dict[int, int]:
    """Return the unshared resident memory of each child process of `multiprocessing`, by process id."""
    found: dict[int, int] = {}
    for child in multiprocessing.active_children():
        try:
            memory = psutil.Process(child.pid).memory_info()
        except psutil.Error:  # it ended meanwhile
            continue
        found[child.pid or 0] = int(memory.rss - getattr(memory, "shared", 0))
    return found


class Measurements:
    """The measurements of a run: of every step at first, and in longer runs of every second, fourth, ... step."""

    def __init__(self) -> None:
        self.stride = 1  # steps from one measurement to the next
        # Arrays: an object for each measurement would itself be memory that grows with the steps.
        self._values = {name: array("q") for name in _NAMES}

    def __len__(self) -> int:
        return len(self._values["step"])

    def add(self, sample: MemorySample) -> None:
        """Add the measurement of a step."""
        for name, values in self._values.items():
            one = sum(sample.children.values()) if name == "children" else getattr(sample, name)
            values.append(one or 0)
        if len(self) >= _MOST_SAMPLES:
            self._values = {name: values[::2] for name, values in self._values.items()}
            self.stride *= 2

    def clear(self) -> None:
        """Forget all measurements."""
        self._values = {name: array("q") for name in _NAMES}

    def growth(self) -> dict[str, Growth]:
        """Fit the growth of each measurement over the newer half of the steps, at least 24 of them."""
        first = len(self) - max(2 * LEAST_POINTS, len(self) // 2)
        recent = {name: values[max(0, first) :].tolist() for name, values in self._values.items()}
        steps = recent.pop("step")
        return {
            name: fit_growth(steps, values, least_total=_LEAST_TOTALS.get(name, 1 << 20))
            for name, values in recent.items()
        }
