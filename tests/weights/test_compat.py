"""The private names of torch are what this package relies on: these tests tell when a new torch changes one."""

import pytest
import torch
from torch import nn

from drivetrain_weights import compat


@pytest.mark.parametrize("module", [nn.Linear(2, 2), nn.MultiheadAttention(4, 2)])
def test_modules_fill_their_parameters_by_one_of_the_methods(module: nn.Module) -> None:
    weight = next(p for p in module.parameters() if p.dim() == 2)
    with torch.no_grad():
        weight.fill_(7.0)
    for name in compat.RESET_METHODS:
        getattr(module, name, lambda: None)()
    assert not weight.eq(7.0).any()
