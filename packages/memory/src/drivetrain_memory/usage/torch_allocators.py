"""The memory of torch's allocators: tensors and cache on each accelerator, and pinned memory of the host.

This file imports torch only where the program did: a program that is looked at from outside needs none.
"""

import sys
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorUsage:
    """The memory of the allocator of one accelerator.

    Attributes:
        reserved_bytes: The memory that the allocator holds, cache included.
    """

    device: str
    allocated_bytes: int
    reserved_bytes: int


def accelerator_names() -> tuple[str, ...]:
    """Return the names of all accelerators that torch sees; empty if torch is not imported or sees none."""
    torch = _torch()
    if torch is None:
        return ()
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return ()
    return tuple(f"{kind.type}:{index}" for index in range(torch.accelerator.device_count()))


def read_allocator(device: str) -> AllocatorUsage:
    """Read the allocator of an accelerator that `accelerator_names` named; it is not waited for."""
    torch = _torch()
    assert torch is not None
    # One call tells both numbers. It says nothing before the first tensor is there.
    stats = torch.accelerator.memory_stats(int(device.rpartition(":")[2]))
    return AllocatorUsage(
        device=device,
        allocated_bytes=stats.get("allocated_bytes.all.current", 0),
        reserved_bytes=stats.get("reserved_bytes.all.current", 0),
    )


def pinned_bytes() -> int | None:
    """Return the pinned host memory that torch's allocator for CUDA holds; None where torch does not tell."""
    torch = _torch()
    if torch is None or not torch.cuda.is_initialized():
        return None
    stats = torch.cuda.host_memory_stats()
    return int(stats.get("allocated_bytes.current", 0))  # the blocks that it owns, cached ones included


def _torch() -> ModuleType | None:
    return sys.modules.get("torch")
