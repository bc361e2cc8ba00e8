"""Gradients that reach an engine otherwise than in a backward of its own."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from deepspeed_engines import Weights, X, backend, engine_of, moved, take_step
from drivetrain_backends import AccumulationError, UnreducedGradientError, full_state_dict


@dataclass
class Score:
    value: Tensor


class Scorer(Weights):
    """Weights whose output is a dataclass."""

    def forward(self, x: Tensor) -> Score:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Score(super().forward(x))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["unwrapped", "dataclass"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_loss_through_another_engine_is_an_error_whatever_way_it_takes(stage: int, how: str) -> None:
    is_score = how == "dataclass"
    with backend(stage=stage) as one:
        models = [Weights(), Scorer() if is_score else Weights()]
        first, second = one.prepare(models, [SGD([m.w], lr=1.0) for m in models], [])
        made = first.model(X) * X
        loss = second.model(made).value if is_score else second.unwrap()(made)
        said = r"a loss of Weights \(number 1 of 2 prepared\) reached Weights \(number 2 of 2 prepared\)"
        with pytest.raises(AccumulationError, match="a loss of Weights reached Scorer" if is_score else said):
            first.backward(loss)
        for prepared in (first, second):
            prepared.optimizers[0].zero_grad()
        for _ in range(2):
            for prepared in (first,) if is_score else (first, second):
                take_step(prepared, prepared.model(X))
        assert moved(first) == [2.0, 4.0, 6.0]
        assert moved(second) == ([0.0] * 3 if is_score else [2.0, 4.0, 6.0])


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", [0, 1])
def test_a_plain_backward_of_the_users_module_is_an_error_at_the_step(stage: int) -> None:
    with engine_of(stage=stage) as (_, _, prepared):
        prepared.optimizers[0].step()  # nothing to step on, as in torch
        prepared.unwrap()(X).backward()
        with pytest.raises(AccumulationError, match=r"call accelerator\.backward\(loss\) in its place"):
            prepared.optimizers[0].step()
        prepared.optimizers[0].zero_grad()
        take_step(prepared, prepared.model(X))
        assert moved(prepared) == [1.0, 2.0, 3.0]


class FrozenHalf(nn.Module):
    """Two weights of (3,), the second frozen; maps x of shape (3,) to ()."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.trained * self.frozen * x).sum()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_parameter_unfrozen_after_prepare_is_named(stage: int) -> None:
    with engine_of(FrozenHalf(), stage=stage) as (_, model, prepared):
        assert not model.frozen.requires_grad
        model.frozen.requires_grad_(True)
        loss = prepared.model(X)
        said = r"frozen was frozen when prepare\(\) built its DeepSpeed engine"
        with pytest.raises(UnreducedGradientError, match=said):
            prepared.backward(loss)


class Failing(torch.autograd.Function):
    """Passes values on; its backward fails, as one that runs out of memory does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise MemoryError("in backward")


class Chain(nn.Module):
    """Weights a and b of (3,); maps x of shape (3,) to the sum of (a + b) x; gradients reach b, then fail."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(3))
        self.b = nn.Parameter(torch.ones(3))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        first = self.a * x
        return ((Failing.apply(first) if self.fails else first) + self.b * x).sum()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_goes_on_after_a_backward_that_failed_half_way_and_was_cleared(stage: int) -> None:
    with engine_of(Chain(), stage=stage) as (_, model, prepared):
        model.fails = True
        loss = prepared.model(X)
        with pytest.raises(MemoryError):
            prepared.backward(loss)
        model.fails = False
        prepared.optimizers[0].zero_grad()
        for _ in range(2):
            take_step(prepared, prepared.model(X))
        for value in full_state_dict(prepared.state_dict()["model"]).values():
            assert (1 - value).tolist() == [2.0, 4.0, 6.0]
