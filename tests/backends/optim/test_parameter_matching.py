import pytest
import torch
from torch import nn
from torch.optim import SGD

from drivetrain_backends import PairingError
from drivetrain_backends.optim.parameter_matching import owners, parameter_names


def test_an_optimizer_is_paired_by_identity_of_parameters() -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)]
    assert owners(SGD(models[1].parameters()), models) == [1]
    assert owners(SGD([*models[2].parameters(), *models[0].parameters()]), models) == [0, 2]


def test_a_parameter_of_no_model_is_named() -> None:
    stray = SGD([nn.Parameter(torch.zeros(3, 4))])
    with pytest.raises(PairingError, match=r"of group 0, of shape \(3, 4\), belongs to no prepared model"):
        owners(stray, [nn.Linear(2, 2)])


def test_names_are_the_models_own_and_prefixed_for_several() -> None:
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    assert list(parameter_names({"0": a}).values()) == ["weight", "bias"]
    assert list(parameter_names({"0": a, "1": b}).values()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
