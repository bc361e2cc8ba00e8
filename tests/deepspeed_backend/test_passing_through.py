"""Gradients that reach an engine otherwise than in a backward of its own."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from deepspeed_backend.engines import Weights, backend, error_of, weights
from drivetrain_backends import AccumulationError, UnreducedGradientError, full_state_dict

X = torch.tensor([1.0, 2.0, 3.0])


@dataclass
class Score:
    value: Tensor


class Scorer(Weights):
    """Weights whose output is a dataclass."""

    def forward(self, x: Tensor) -> Score:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Map (3,) to a score of ()."""
        return Score(super().forward(x))


def passed_through(stage: int, how: str) -> list[object]:
    """What is said of a loss through another engine; how far both move in two steps after it."""
    with backend(stage=stage) as one:
        models = [Weights(), Scorer() if how == "dataclass" else Weights()]
        first, second = one.prepare(models, [SGD([m.w], lr=1.0) for m in models], [])
        one.window.begin()
        made = first.model(X) * X
        loss = second.model(made).value if how == "dataclass" else second.unwrap()(made)
        said = error_of(AccumulationError, lambda: first.backward(loss))
        for prepared in (first, second):
            prepared.optimizers[0].zero_grad()
        moved: list[list[float]] = []
        for _ in range(2):
            one.window.begin()
            for prepared in (first, second) if how != "dataclass" else (first,):
                prepared.backward(prepared.model(X))
                prepared.optimizers[0].step()
                prepared.optimizers[0].zero_grad()
        moved = [[1 - w for w in weights(prepared)] for prepared in (first, second)]
        return [said, *moved]


@pytest.mark.parametrize("how", ["unwrapped", "dataclass"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_loss_through_another_engine_is_an_error_whatever_way_it_takes(
    run_ranks, stage: int, how: str
) -> None:
    reached = "a loss of Weights reached Scorer"
    if how == "unwrapped":
        reached = "a loss of Weights (number 1 of 2 prepared) reached Weights (number 2 of 2 prepared)"
    for said, first, second in run_ranks(passed_through, stage, how, num_processes=2):
        assert reached in said
        assert first == [2.0, 4.0, 6.0]
        assert second == ([2.0, 4.0, 6.0] if how == "unwrapped" else [0.0] * 3)


def past_the_engine(stage: int) -> list[object]:
    """A plain backward of the user's own module, then a step; then zero_grad, and a step of the engine's."""
    with backend(stage=stage) as one:
        model = Weights()
        (prepared,) = one.prepare([model], [SGD([model.w], lr=1.0)], [])
        prepared.optimizers[0].step()  # nothing to step on, as in torch
        one.window.begin()
        prepared.unwrap()(X).backward()
        said = error_of(AccumulationError, prepared.optimizers[0].step)
        prepared.optimizers[0].zero_grad()
        prepared.backward(prepared.model(X))
        prepared.optimizers[0].step()
        return [said, [1 - w for w in weights(prepared)]]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_plain_backward_of_the_users_module_is_an_error_at_the_step(run_ranks, stage: int) -> None:
    ((said, moved),) = run_ranks(past_the_engine, stage, num_processes=1)
    assert "call accelerator.backward(loss) in its place" in said
    assert moved == [1.0, 2.0, 3.0]


class FrozenHalf(nn.Module):
    """Two weights of (3,), the second frozen; maps x of shape (3,) to ()."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (3,) to ()."""
        return (self.trained * self.frozen * x).sum()


def unfrozen(stage: int) -> list[object]:
    with backend(stage=stage) as one:
        model = FrozenHalf()
        (prepared,) = one.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
        still_frozen = not model.frozen.requires_grad
        model.frozen.requires_grad_(True)
        one.window.begin()
        return [still_frozen, error_of(UnreducedGradientError, lambda: prepared.backward(prepared.model(X)))]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_parameter_unfrozen_after_prepare_is_named(run_ranks, stage: int) -> None:
    for still_frozen, said in run_ranks(unfrozen, stage, num_processes=2):
        assert still_frozen
        assert "frozen was frozen when prepare() built its DeepSpeed engine" in said


class Failing(torch.autograd.Function):
    """Passes values on; its backward fails, as one that runs out of memory does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Map (n,) to (n,)."""
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Fail."""
        raise MemoryError("in backward")


class Chain(nn.Module):
    """Weights a and b of (3,); maps x of shape (3,) to the sum of (a + b) x; gradients reach b, then fail."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(3))
        self.b = nn.Parameter(torch.ones(3))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        """Map (3,) to ()."""
        first = self.a * x
        return ((Failing.apply(first) if self.fails else first) + self.b * x).sum()


def interrupted(stage: int) -> list[list[float]]:
    """How far two steps move the weights after a backward that failed half-way, and was cleared away."""
    with backend(stage=stage) as one:
        model = Chain()
        (prepared,) = one.prepare([model], [SGD(model.parameters(), lr=1.0)], [])
        one.window.begin()
        model.fails = True
        error_of(MemoryError, lambda: prepared.backward(prepared.model(X)))
        model.fails = False
        prepared.optimizers[0].zero_grad()
        for _ in range(2):
            one.window.begin()
            prepared.backward(prepared.model(X))
            prepared.optimizers[0].step()
            prepared.optimizers[0].zero_grad()
        return [(1 - value).tolist() for value in full_state_dict(prepared.state_dict()["model"]).values()]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_goes_on_after_a_backward_that_failed(run_ranks, stage: int) -> None:
    for moved in run_ranks(interrupted, stage, num_processes=2):
        assert moved == [[2.0, 4.0, 6.0]] * 2
