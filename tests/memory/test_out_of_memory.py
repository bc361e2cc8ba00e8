import numpy as np
import pytest
import torch

from drivetrain_memory import is_out_of_memory


def test_the_host_allocators_own_errors_are_known() -> None:
    with pytest.raises(RuntimeError, match="memory") as of_torch:
        torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(MemoryError, match="allocate") as of_numpy:
        np.ones(2**58, dtype=np.uint8)
    assert is_out_of_memory(of_torch.value)
    assert is_out_of_memory(of_numpy.value)


# What libraries say, as their documentation or their issues quote it.
MESSAGES = [
    "HIP out of memory. Tried to allocate 2.00 GiB",
    "XPU out of memory. Tried to allocate 2.00 GiB",
    "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "MPS backend out of memory (MPS allocated: 8.00 GB, other allocations: 1.00 GB, max allowed: 9.07 GB)",
    "Invalid buffer size: 62.56 GB",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "NCCL error: unhandled cuda error, NCCL version 2.26.2\nLast error:\nCuda failure 2 'out of memory'",
    "Bad StatusOr access: RESOURCE_EXHAUSTED: Attempting to allocate 2.00G",
    "unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)",
    "DataLoader worker (pid 5) is killed by signal: Killed.",
]


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_of_libraries_are_known(message: str) -> None:
    assert is_out_of_memory(RuntimeError(message))


def test_a_failed_collective_of_nccl_is_known() -> None:
    assert is_out_of_memory(torch.distributed.DistBackendError("Cuda failure 2 'out of memory'"))


@pytest.mark.parametrize("error", [ValueError("out of memory"), RuntimeError("shape"), KeyboardInterrupt()])
def test_others_are_not(error: BaseException) -> None:
    assert not is_out_of_memory(error)
