"""A module's dict of parameters is what its forward reads them from."""

import pytest
import torch
from torch import nn

from drivetrain_parallel.compat import exchanged_parameters


def test_a_forward_reads_the_exchanged_parameters() -> None:
    layer = nn.Linear(2, 1, bias=False)
    weight = layer.weight
    with exchanged_parameters(layer, lambda parameter: parameter * 0 + 2):
        assert layer(torch.ones(2)).item() == 4
    assert layer.weight is weight
    assert dict(layer.named_parameters()) == {"weight": weight}


def test_the_parameters_are_back_after_a_failure_and_none_stays_none() -> None:
    layer = nn.Linear(2, 1, bias=False)
    weight = layer.weight
    with pytest.raises(RuntimeError, match="cannot be multiplied"), exchanged_parameters(layer, torch.clone):
        layer(torch.ones(2, 3))
    with exchanged_parameters(layer, torch.clone):
        assert layer.bias is None
    assert layer.weight is weight
