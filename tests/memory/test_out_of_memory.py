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


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a CUDA device")
def test_the_device_allocators_error_is_known() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="out of memory") as caught:
        torch.empty(2**45, dtype=torch.uint8, device="cuda")
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize("error", [ValueError("out of memory"), RuntimeError("shape"), KeyboardInterrupt()])
def test_others_are_not(error: BaseException) -> None:
    assert not is_out_of_memory(error)
