"""The all-reduce of full gradients."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from drivetrain_backends.gradients.averaging import average


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_both_parts_of_complex_gradients_are_averaged(dtype: torch.dtype | None) -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    parameter.grad = torch.tensor([1 + 2j, 3 - 1j]) * (1 + dist.get_rank())
    average([parameter], torch.device("cpu"), dtype=dtype)
    assert parameter.grad.tolist() == [1.5 + 3j, 4.5 - 1.5j]
