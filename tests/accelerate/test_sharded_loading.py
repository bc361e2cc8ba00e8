"""What programs ask about the weights of sharded models, beside the installed Accelerate."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain_accelerate import sharded_loading
from drivetrain_config import environ

real: Any = pytest.importorskip("accelerate.utils.fsdp_utils")

NAME = "FSDP_CPU_RAM_EFFICIENT_LOADING"


def test_the_variables_are_those_of_the_real_one() -> None:
    with environ.exported(**{NAME: None, "ACCELERATE_USE_FSDP": None}):
        found: list[Any] = []
        for module in (sharded_loading, real):
            module.enable_fsdp_ram_efficient_loading()
            found.append([environ.read(NAME), environ.read("ACCELERATE_USE_FSDP")])
            module.disable_fsdp_ram_efficient_loading()
            found[-1].append(environ.read(NAME))
            environ.replace(
                {name: text for name, text in environ.child_environment().items() if "FSDP" not in name}
            )
        assert found[0] == found[1] == ["True", "True", "False"]


def test_names_lose_what_wrappers_add() -> None:
    names = {
        "_fsdp_wrapped_module.a._checkpoint_wrapped_module.w": 1,
        "_orig_mod.b": 2,
        "x._orig_mod.y": 3,
        "module.q": 4,
        "a._fsdp_wrapped_module.b": 5,
    }
    assert sharded_loading.fsdp2_canonicalize_names(names) == real.fsdp2_canonicalize_names(names)


def test_parameters_are_found_by_modules_and_by_patterns() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    for chosen in ("0", "[02]", ".*", "x", [model[0]], []):
        mine = sharded_loading.get_parameters_from_modules(chosen, model, torch.device("cpu"))
        assert mine == real.get_parameters_from_modules(chosen, model, torch.device("cpu"))


class Tied(nn.Module):
    _tied_weights_keys = ("head.weight",)

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.head = nn.Linear(2, 2)
        self.head.weight = self.body.weight


def renewed(module: nn.Module) -> nn.Module:
    for name, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(parameter.detach().clone()))
    return module


def test_tied_weights_stay_one() -> None:
    for tie in (sharded_loading.ensure_weights_retied, real.ensure_weights_retied):
        model = Tied()
        initialise = tie(renewed, model, torch.device("cpu"))
        before = model.body.weight
        for module in model.modules():
            initialise(module)
        assert model.body.weight is model.head.weight
        assert model.body.weight is not before
    plain = nn.Linear(1, 1)
    assert sharded_loading.ensure_weights_retied(renewed, plain, torch.device("cpu")) is renewed
    assert copy.copy(renewed) is renewed


def test_a_loss_scale_takes_torchs_arguments() -> None:
    assert not sharded_loading.get_fsdp2_grad_scaler(enabled=False).is_enabled()
