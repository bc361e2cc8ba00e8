"""States of engines with parameter groups: what is saved, what a load puts in the place of what was there."""

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from deepspeed_engines import X, backend, take_step
from drivetrain_backends import Prepared, full_state_dict
from drivetrain_deepspeed import DeepSpeedBackend

PARTITIONED = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


class Pair(nn.Module):
    """Weights a and b of (3,); maps x of shape (3,) to the sum of (a + 2 b) x."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(3))
        self.b = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.a + 2 * self.b) * x).sum()


def config(stage: int) -> dict[str, Any] | None:
    return PARTITIONED if stage == 3 else None


def prepared_pair(one: DeepSpeedBackend) -> Prepared:
    """A pair, b without weight decay."""
    model = Pair()
    groups = [{"params": [model.a], "weight_decay": 0.1}, {"params": [model.b], "weight_decay": 0.0}]
    (prepared,) = one.prepare([model], [AdamW(groups, lr=0.1)], [])
    return prepared


def train(prepared: Prepared, *factors: float) -> dict[str, list[float]]:
    """A step for each factor of the loss; the weights after them."""
    for factor in factors:
        take_step(prepared, prepared.model(X) * factor)
    return {name: value.tolist() for name, value in saved(prepared)["model"].items()}


def saved(prepared: Prepared) -> dict[str, Any]:
    """A copy of the whole state."""
    return deepcopy(full_state_dict(prepared.state_dict()))


def averages(state: dict[str, Any]) -> dict[str, list[float]]:
    return {name: kept["exp_avg"].tolist() for name, kept in state["optimizers"][0]["state"].items()}


WAYS = pytest.mark.parametrize(("stage", "mode"), [(0, "no"), (1, "no"), (1, "bf16"), (2, "no"), (3, "no")])


@contextmanager
def pair(stage: int, mode: str) -> Generator[Any]:
    with backend(stage=stage, mode=mode, config=config(stage)) as one:
        yield prepared_pair(one)


def check_two_groups(stage: int, mode: str) -> None:
    with pair(stage, mode) as prepared:
        train(prepared, 1.0)
        assert averages(saved(prepared)) == {
            "a": pytest.approx((0.1 * X).tolist(), rel=1e-5),
            "b": pytest.approx((0.2 * X).tolist(), rel=1e-5),
        }


@WAYS
@pytest.mark.default_cases("1-bf16", "3-no")
@pytest.mark.ranks(1)
def test_every_group_is_saved_with_its_state_by_one_rank(stage: int, mode: str) -> None:
    check_two_groups(stage, mode)


@WAYS
@pytest.mark.ranks(2)
def test_every_group_is_saved_with_its_state_by_two_ranks(stage: int, mode: str) -> None:
    check_two_groups(stage, mode)


@WAYS
@pytest.mark.ranks(2)
def test_training_goes_on_from_a_state_as_it_did_also_from_one_before_the_first_step(
    stage: int, mode: str
) -> None:
    with pair(stage, mode) as prepared:  # which goes on meanwhile
        fresh = saved(prepared)
        train(prepared, 1.0, -2.0)
        state = saved(prepared)
        expected = train(prepared, 3.0, -0.5)
        prepared.load_state_dict(deepcopy(state))  # stage 0 trains on in it, as torch does
        assert train(prepared, 3.0, -0.5) == expected
        prepared.load_state_dict(fresh)
        assert saved(prepared)["optimizers"][0]["state"] == {}
        train(prepared, 1.0, -2.0)
        assert train(prepared, 3.0, -0.5) == expected
    with pair(stage, mode) as prepared:
        prepared.load_state_dict(state)
        assert train(prepared, 3.0, -0.5) == expected


def whole_values(state: dict[str, Any]) -> object:
    model = {name: value.tolist() for name, value in state["model"].items()}
    return model, averages(state), [group["params"] for group in state["optimizers"][0]["param_groups"]]


@WAYS
@pytest.mark.default_cases("1-bf16", "3-no")
@pytest.mark.ranks(2)
def test_a_parameter_that_is_frozen_for_a_while_keeps_its_state(stage: int, mode: str) -> None:
    """While a state is saved and loaded, as another model's step leaves it."""
    with pair(stage, mode) as prepared:
        fresh = saved(prepared)
        train(prepared, 1.0, -2.0)
        expected = whole_values(saved(prepared))
        first = next(prepared.model.parameters())
        first.requires_grad_(False)
        state = saved(prepared)
        assert whole_values(state) == expected
        prepared.load_state_dict(fresh)
        prepared.load_state_dict(deepcopy(state))
        first.requires_grad_(True)
        assert whole_values(saved(prepared)) == expected


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_a_state_does_not_hold_is_not_kept(stage: int) -> None:
    with backend(stage=stage, config=config(stage)) as one:
        model = Pair()
        (prepared,) = one.prepare([model], [AdamW(model.parameters(), lr=0.1)], [])
        train(prepared, 1.0)
        state = saved(prepared)
        del state["optimizers"][0]["state"]["b"]
        train(prepared, 1.0)
        prepared.load_state_dict(state)
        assert averages(saved(prepared)) == {"a": pytest.approx((0.1 * X).tolist(), rel=1e-5), "b": [0.0] * 3}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", [0, 2])
def test_a_rate_set_after_a_load_is_that_of_the_optimizer_that_deepspeed_built(stage: int) -> None:
    section = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}}
    with backend(stage=stage, config=section) as one:
        model = Pair()
        optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
        (prepared,) = one.prepare([model], [optimizer], [])
        train(prepared, 1.0)
        prepared.load_state_dict(saved(prepared))
        before = train(prepared)
        optimizer.param_groups[0]["lr"] = 0.0
        assert train(prepared, 1.0) == before
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.param_groups[0]["lr"] = 0.1
        assert train(prepared, 1.0) != before


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_group_added_after_prepare_is_trained_or_refused(stage: int) -> None:
    with backend(stage=stage, config=config(stage)) as one:
        model = Pair()
        model.b.requires_grad_(stage == 0)
        (prepared,) = one.prepare([model], [AdamW([model.a], lr=0.1, weight_decay=0.0)], [])
        train(prepared, 1.0)
        refused = pytest.raises(RuntimeError, match=r"Add the group before prepare\(\)")
        with refused if stage else nullcontext():
            prepared.optimizers[0].add_param_group({"params": [model.b], "lr": 0.2})
        moved = train(prepared, 1.0)
        prepared.load_state_dict(saved(prepared))
        assert moved["a"] == pytest.approx([0.8] * 3, abs=1e-5)
        assert moved["b"] == pytest.approx([1.0 if stage else 0.8] * 3, abs=1e-5)
