"""The stand-in for the user's optimizer, and its state under the parameters' names."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from drivetrain_backends.optim.optimizer import PreparedOptimizer
from drivetrain_backends.state_dict.optimizer_state import load_named_state, named_state
from plain_loop.backends import linear, plain_step
from plain_loop.backends import single as backend


def prepared_optimizer(optimizer: Optimizer, model: nn.Module, accumulation: int = 1) -> PreparedOptimizer:
    (prepared,) = backend(accumulation=accumulation).prepare([model], [optimizer], [])
    return prepared.optimizers[0]


def trained(optimizer: Optimizer, model: nn.Module) -> None:
    plain_step(optimizer, model(torch.ones(3, 2)).sum())


def test_an_optimizer_step_with_a_closure_is_refused() -> None:
    model = linear()
    optimizer = prepared_optimizer(SGD(model.parameters()), model)
    with pytest.raises(ValueError, match="a closure computes gradients outside"):
        optimizer.step(lambda: 0.0)


def test_groups_state_and_defaults_are_those_of_the_users_optimizer() -> None:
    model = linear()
    own = AdamW(model.parameters(), lr=0.5)
    optimizer = prepared_optimizer(own, model)
    assert isinstance(optimizer, Optimizer)
    optimizer.param_groups[0]["lr"] = 0.25
    trained(optimizer, model)
    assert own.param_groups[0]["lr"] == 0.25
    assert optimizer.state is own.state
    assert optimizer.defaults is own.defaults
    assert optimizer.num_steps == 1
    with pytest.raises(AttributeError, match="'AdamW' object has no attribute 'sideways'"):
        _ = optimizer.sideways


def test_a_group_added_later_is_trained() -> None:
    model = linear()
    optimizer = prepared_optimizer(SGD([model.weight], lr=0.1), model)
    optimizer.add_param_group({"params": [model.bias], "lr": 1.0})
    before = model.bias.detach().clone()
    trained(optimizer, model)
    torch.testing.assert_close(before - model.bias, torch.tensor([3.0]))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copy_of_its_state_is_complete(duplicate) -> None:
    model = linear()
    optimizer = prepared_optimizer(AdamW(model.parameters()), model)
    trained(optimizer, model)
    state = duplicate(optimizer.state_dict())
    other = AdamW(linear().parameters())
    other.load_state_dict(state)
    assert other.state_dict()["state"].keys() == state["state"].keys() == {0, 1}


def names(model: nn.Module) -> dict[torch.Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def test_a_state_by_name_survives_another_order_of_the_parameters() -> None:
    model, other = linear(), linear()
    saved_from = AdamW([model.weight, model.bias])
    trained(saved_from, model)
    state = named_state(saved_from, names(model))
    loaded_into = AdamW([other.bias, other.weight])
    state["param_groups"][0]["params"].reverse()
    load_named_state(loaded_into, names(other), state)
    for name in ("weight", "bias"):
        one, same = saved_from.state[getattr(model, name)], loaded_into.state[getattr(other, name)]
        assert all(torch.equal(one[key], same[key]) for key in ("exp_avg", "exp_avg_sq", "step"))


def test_a_state_of_other_parameters_or_groups_is_refused() -> None:
    model = linear()
    whole = named_state(SGD(model.parameters()), names(model))
    with pytest.raises(
        ValueError, match=r"differs from the checkpoint's by \['bias'\]; build it over the same"
    ):
        load_named_state(SGD([model.weight]), names(model), whole)
    two_groups = SGD([{"params": [model.weight]}, {"params": [model.bias]}])
    with pytest.raises(ValueError, match="has 2 parameter groups, the checkpoint 1"):
        load_named_state(two_groups, names(model), whole)


def plainly(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, plainly])
def test_a_copy_of_a_prepared_optimizer_is_the_users_own(duplicate: Callable[[Any], Any]) -> None:
    model = linear()
    optimizer = prepared_optimizer(AdamW(model.parameters(), lr=0.5), model)
    trained(optimizer, model)
    found = duplicate(optimizer)
    assert type(found) is AdamW
    assert found.param_groups[0]["lr"] == 0.5
    assert [state["step"] for state in found.state.values()] == [1, 1]
    found.step()  # of use by itself


def test_a_model_and_its_optimizer_are_copied_together() -> None:
    model = linear()
    optimizer = prepared_optimizer(SGD(model.parameters(), lr=0.5), model)
    twin, its_optimizer = copy.deepcopy((model, optimizer))
    before = model.weight.detach().clone()
    twin(torch.ones(3, 2)).sum().backward()
    its_optimizer.step()
    assert torch.equal(model.weight, before)
    assert not torch.equal(twin.weight, before)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, plainly])
def test_a_copy_of_a_prepared_scheduler_is_the_users_own(duplicate: Callable[[Any], Any]) -> None:
    model, single = linear(), backend()
    optimizer = SGD(model.parameters(), lr=1.0)
    (prepared,) = single.prepare([model], [optimizer], [StepLR(optimizer, 1, gamma=0.5)])
    trained(prepared.optimizers[0], model)
    prepared.schedulers[0].step()
    found = duplicate(prepared.schedulers[0])
    assert type(found) is StepLR
    assert found.last_epoch == 1
    assert found.optimizer.param_groups[0]["lr"] == 0.5
    over_prepared = StepLR(prepared.optimizers[0], 1, gamma=0.5)  # holds the prepared optimizer
    assert type(copy.deepcopy(over_prepared).optimizer) is SGD
