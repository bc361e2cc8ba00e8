"""The private names of torch that this package uses, in one place.

torch has no public API for them. They are the same in torch 2.9 to 2.15. tests/memory/test_compat.py, and for devices
tests/hardware/test_memory.py, test the behaviour that is relied on. docs/design/platforms.md lists the names.
"""

import ctypes
import sys
import tracemalloc
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter  # pyright: ignore[reportPrivateUsage]

# The attributes of a module in which it keeps its tensors and submodules, whose names a user knows without them.
MODULE_TABLES = frozenset({"_parameters", "_buffers", "_modules"})

# The iterator of a loader with workers.
WORKERS_ITERATOR: type[Any] = _MultiProcessingDataLoaderIter


def workers_of(iterator: object) -> dict[int, str]:
    """Return a name for each worker process of a loader's iterator, by process id; empty for other objects."""
    # Not isinstance, which reads attributes of proxies.
    if not issubclass(type(iterator), _MultiProcessingDataLoaderIter):
        return {}
    workers: list[Any] = iterator._workers  # pyright: ignore[reportAttributeAccessIssue]
    return {worker.pid: f"worker {index} of a DataLoader" for index, worker in enumerate(workers)}


def end_persistent_workers(loader: DataLoader[Any]) -> int:
    """End the workers that a loader keeps between epochs; return their number."""
    iterator: Any = loader._iterator  # pyright: ignore[reportPrivateUsage]
    if not isinstance(iterator, _MultiProcessingDataLoaderIter):
        return 0
    count = len(workers_of(iterator))
    iterator._shutdown_workers()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    loader._iterator = None  # pyright: ignore[reportPrivateUsage]
    return count


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile` was applied to a module or to one inside it, as a wrapper or in place."""
    return any(
        hasattr(one, "_orig_mod") or getattr(one, "_compiled_call_impl", None) is not None
        for one in module.modules()
    )


def host_allocator_bytes() -> int:
    """Return the bytes of page-locked memory that tensors use; 0 without CUDA, or before its first use."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return 0
    stats = torch.cuda.host_memory_stats()
    # torch 2.9 has no bytes in use, and counts as allocated what is.
    return int(stats.get("active_bytes.current", stats.get("allocated_bytes.current", 0)))


def allocation_frames(value: object) -> list[tuple[str, int]]:
    """Return file and line of the frames that made an object, innermost first; empty if it was not traced."""
    if (trace := tracemalloc.get_object_traceback(value)) is not None:
        return [(frame.filename, frame.lineno) for frame in reversed(trace)]
    if sys.version_info >= (3, 12) or sys.implementation.name != "cpython":
        return []
    # Python 3.11 looks 16 bytes behind the start of objects whose type has the flag MANAGED_DICT; 3.12 does not.
    read: Any = ctypes.pythonapi._PyTraceMalloc_GetTraceback
    read.argtypes, read.restype = [ctypes.c_uint, ctypes.c_size_t], ctypes.py_object
    return list(read(0, id(value) - 32) or ())


def coo_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices and values that a sparse COO tensor stores.

    The public methods refuse a tensor with repeated entries, such as the gradient of a sparse embedding, and
    coalescing it would copy it.
    """
    return tensor._indices(), tensor._values()
