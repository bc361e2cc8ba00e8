"""States of engines with parameter groups: what is saved, what a load puts in the place of what was there."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from deepspeed_backend.engines import backend
from drivetrain_backends import DeepSpeedBackend, Prepared, full_state_dict

X = torch.tensor([1.0, 2.0, 3.0])
PARTITIONED = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


class Pair(nn.Module):
    """Weights a and b of (3,); maps x of shape (3,) to the sum of (a + 2 b) x."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(3))
        self.b = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        """Map (3,) to ()."""
        return ((self.a + 2 * self.b) * x).sum()


def config(stage: int) -> dict[str, Any] | None:
    return PARTITIONED if stage == 3 else None


def prepared_pair(one: DeepSpeedBackend) -> Prepared:
    """A pair, b without weight decay."""
    model = Pair()
    groups = [{"params": [model.a], "weight_decay": 0.1}, {"params": [model.b], "weight_decay": 0.0}]
    (prepared,) = one.prepare([model], [AdamW(groups, lr=0.1)], [])
    return prepared


def train(one: DeepSpeedBackend, prepared: Prepared, *factors: float) -> dict[str, list[float]]:
    """A step for each factor of the loss; the weights after them."""
    for factor in factors:
        one.window.begin()
        prepared.backward(prepared.model(X) * factor)
        prepared.optimizers[0].step()
        prepared.optimizers[0].zero_grad()
    return {name: value.tolist() for name, value in saved(prepared)["model"].items()}


def saved(prepared: Prepared) -> dict[str, Any]:
    """A copy of the whole state."""
    return deepcopy(full_state_dict(prepared.state_dict()))


def averages(state: dict[str, Any]) -> dict[str, list[float]]:
    return {name: kept["exp_avg"].tolist() for name, kept in state["optimizers"][0]["state"].items()}


def of_two_groups(stage: int, mode: str) -> dict[str, list[float]]:
    with backend(stage=stage, mode=mode, config=config(stage)) as one:
        prepared = prepared_pair(one)
        train(one, prepared, 1.0)
        return averages(saved(prepared))


@pytest.mark.parametrize(("stage", "mode"), [(0, "no"), (1, "no"), (1, "bf16"), (2, "no"), (3, "no")])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_every_group_is_saved_with_its_state(run_ranks, num_processes: int, stage: int, mode: str) -> None:
    for found in run_ranks(of_two_groups, stage, mode, num_processes=num_processes):
        assert found == {
            "a": pytest.approx((0.1 * X).tolist(), rel=1e-5),
            "b": pytest.approx((0.2 * X).tolist(), rel=1e-5),
        }


def taken_up(stage: int, mode: str) -> list[object]:
    """Two steps more from a state: in the engine that went on meanwhile, and in a new one."""
    with backend(stage=stage, mode=mode, config=config(stage)) as one:
        prepared = prepared_pair(one)
        fresh = saved(prepared)
        train(one, prepared, 1.0, -2.0)
        state = saved(prepared)
        expected = train(one, prepared, 3.0, -0.5)
        prepared.load_state_dict(deepcopy(state))  # stage 0 trains on in it, as torch does
        found: list[object] = [train(one, prepared, 3.0, -0.5) == expected]
        prepared.load_state_dict(fresh)
        found.append(saved(prepared)["optimizers"][0]["state"] == {})
        train(one, prepared, 1.0, -2.0)
        found.append(train(one, prepared, 3.0, -0.5) == expected)
    with backend(stage=stage, mode=mode, config=config(stage)) as one:
        prepared = prepared_pair(one)
        prepared.load_state_dict(state)
        return [*found, train(one, prepared, 3.0, -0.5) == expected]


@pytest.mark.parametrize(("stage", "mode"), [(0, "no"), (1, "no"), (1, "bf16"), (2, "no"), (3, "no")])
def test_training_goes_on_from_a_state_as_it_did_also_from_one_before_the_first_step(
    run_ranks, stage: int, mode: str
) -> None:
    assert run_ranks(taken_up, stage, mode, num_processes=2) == [[True] * 4] * 2


def frozen_meanwhile(stage: int, mode: str) -> list[object]:
    """A parameter that is frozen while a state is saved, as another model's step leaves it, and loaded."""
    with backend(stage=stage, mode=mode, config=config(stage)) as one:
        prepared = prepared_pair(one)
        fresh = saved(prepared)
        train(one, prepared, 1.0, -2.0)
        expected = saved(prepared)
        first = next(prepared.model.parameters())
        first.requires_grad_(False)
        state = saved(prepared)
        found: list[object] = [whole_values(state) == whole_values(expected)]
        prepared.load_state_dict(fresh)
        prepared.load_state_dict(deepcopy(state))
        first.requires_grad_(True)
        return [*found, whole_values(saved(prepared)) == whole_values(expected)]


def whole_values(state: dict[str, Any]) -> object:
    model = {name: value.tolist() for name, value in state["model"].items()}
    return model, averages(state), [group["params"] for group in state["optimizers"][0]["param_groups"]]


@pytest.mark.parametrize(("stage", "mode"), [(0, "no"), (1, "no"), (1, "bf16"), (2, "no"), (3, "no")])
def test_a_parameter_that_is_frozen_for_a_while_keeps_its_state(run_ranks, stage: int, mode: str) -> None:
    assert run_ranks(frozen_meanwhile, stage, mode, num_processes=2) == [[True, True]] * 2


def of_one_alone(stage: int) -> dict[str, list[float]]:
    """Loaded from a state in which b has none, after steps in which it had."""
    with backend(stage=stage, config=config(stage)) as one:
        model = Pair()
        (prepared,) = one.prepare([model], [AdamW(model.parameters(), lr=0.1)], [])
        train(one, prepared, 1.0)
        state = saved(prepared)
        del state["optimizers"][0]["state"]["b"]
        train(one, prepared, 1.0)
        prepared.load_state_dict(state)
        return averages(saved(prepared))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_a_state_does_not_hold_is_not_kept(run_ranks, stage: int) -> None:
    for found in run_ranks(of_one_alone, stage, num_processes=2):
        assert found == {"a": pytest.approx((0.1 * X).tolist(), rel=1e-5), "b": [0.0] * 3}


def stopped_after_loading(stage: int) -> list[object]:
    """An engine whose optimizer DeepSpeed builds: is a rate of 0, set after a load, the one that steps?"""
    section = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}}
    with backend(stage=stage, config=section) as one:
        model = Pair()
        optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
        (prepared,) = one.prepare([model], [optimizer], [])
        train(one, prepared, 1.0)
        prepared.load_state_dict(saved(prepared))
        before = train(one, prepared)
        optimizer.param_groups[0]["lr"] = 0.0
        after = train(one, prepared, 1.0)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.param_groups[0]["lr"] = 0.1
        return [before == after, before != train(one, prepared, 1.0)]


@pytest.mark.parametrize("stage", [0, 2])
def test_a_rate_set_after_a_load_is_that_of_deepspeeds_own_optimizer(run_ranks, stage: int) -> None:
    assert run_ranks(stopped_after_loading, stage, num_processes=1) == [[True, True]]


def added_group(stage: int) -> list[object]:
    """A group for b, added after prepare: what is said of it, and what is trained with it."""
    with backend(stage=stage, config=config(stage)) as one:
        model = Pair()
        model.b.requires_grad_(stage == 0)
        (prepared,) = one.prepare([model], [AdamW([model.a], lr=0.1, weight_decay=0.0)], [])
        train(one, prepared, 1.0)
        try:
            prepared.optimizers[0].add_param_group({"params": [model.b], "lr": 0.2})
            said = ""
        except RuntimeError as error:
            said = str(error)
        moved = train(one, prepared, 1.0)
        prepared.load_state_dict(saved(prepared))
        return [said, moved["a"], moved["b"]]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_group_added_after_prepare_is_trained_or_refused(run_ranks, stage: int) -> None:
    for said, a, b in run_ranks(added_group, stage, num_processes=2):
        assert ("Add the group before prepare()" in said) == (stage > 0)
        assert a == pytest.approx([0.8] * 3, abs=1e-5)
        assert b == pytest.approx([1.0 if stage else 0.8] * 3, abs=1e-5)
