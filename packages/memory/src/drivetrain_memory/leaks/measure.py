"""The memory of a process at a step, by place, in some 50 microseconds."""

import gc
import multiprocessing
import sys
import tracemalloc
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from drivetrain_memory.compat import host_allocator_bytes
from drivetrain_memory.system_heap import heap_use

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """The memory of this process at one step, in bytes.

    Attributes:
        resident: The resident memory that is the process's own, without pages of files where the system tells.
        heap_used: The allocated bytes of the system's heap, CPU tensors among them; None where it does not tell.
        heap_free: The bytes of that heap between those in use; None where it does not tell.
        children: The own resident memory of each child process, by its id.
    """

    step: int
    resident: int
    heap_used: int | None
    heap_free: int | None
    python_blocks: int
    device_allocated: int = 0
    device_reserved: int = 0
    pinned: int = 0
    children: Mapping[int, int] = field(default_factory=dict[int, int])


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
    """Return the resident memory that no file backs, or all of it where the system does not tell them apart."""
    if _STATUS.exists():
        with _STATUS.open() as lines:
            for line in lines:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
    return int(psutil.Process().memory_info().rss)


def children_bytes() -> dict[int, int]:
    """Return the resident memory of each process that `multiprocessing` started, without what it shares, by id."""
    found: dict[int, int] = {}
    for child in multiprocessing.active_children():
        try:
            memory = psutil.Process(child.pid).memory_info()
        except psutil.Error:  # it ended meanwhile
            continue
        found[child.pid or 0] = int(memory.rss - getattr(memory, "shared", 0))
    return found
