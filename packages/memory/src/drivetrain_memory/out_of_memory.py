"""Recognise exceptions that mean "out of memory"."""

from errno import ENOMEM

import torch

# Messages of torch and its libraries where they raise a plain RuntimeError.
_MESSAGES = (
    "out of memory",  # CUDA, HIP, XPU, MPS, NPU; NCCL, where it allocates for itself
    "OUT_OF_DEVICE_MEMORY",  # the driver of XPU
    "Invalid buffer size",  # MPS, for one tensor beyond its largest buffer
    "can't allocate memory",  # the CPU allocator on Linux and macOS
    "not enough memory",  # the CPU allocator on Windows
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "RESOURCE_EXHAUSTED",  # XLA
    "std::bad_alloc",  # a C++ library on the host
    "Cannot allocate memory",  # the system's own words for ENOMEM
    "unable to allocate shared memory",  # for the batch of a DataLoader's worker, in /dev/shm
    "is killed by signal: Killed",  # a DataLoader's worker, by the kernel's out-of-memory killer
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that the host or an accelerator ran out of memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == ENOMEM
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)
