"""Gradients of replicas: held back for a window, lent to a program, and of ranks that run out of batches."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from drivetrain_backends import (
    AccumulationError,
    BackwardOptions,
    DDPBackend,
    PairingError,
    SingleBackend,
    SupportsManualSteps,
)
from drivetrain_precision import PrecisionSettings
from plain_loop.backends import ddp, held, plain_step, prepare_sgd, step_and_clear
from plain_loop.case import assert_same_on_all_ranks


@dataclass
class Output:
    logits: torch.Tensor


class Answering(nn.Linear):
    """A layer of one weight; its answer is a tensor, or within something else."""

    def __init__(self, kind: str) -> None:
        super().__init__(1, 1, bias=False)
        nn.init.zeros_(self.weight)
        self.kind = kind

    def forward(self, x: torch.Tensor):
        y = super().forward(x)
        kinds = {"dict": {"logits": (y,)}, "dataclass": Output(y), "object": SimpleNamespace(logits=y)}
        return kinds.get(self.kind, y)


def answer(output) -> torch.Tensor:
    if isinstance(output, dict):
        return output["logits"][0]
    return output if isinstance(output, torch.Tensor) else output.logits


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["tensor", "dict", "dataclass", "object"])
@pytest.mark.parametrize(
    ("reached", "clear", "expected"),
    [
        (["ab", "ab"], False, (1.5, 1.5)),
        (["a", "ab"], False, (1.5, 0.75)),
        (["a", "a"], False, (1.5, 0.0)),
        (["ab", "a"], False, (1.5, 0.75)),
        (["ab", "a"], True, (1.5, 0.0)),
    ],
)
def test_held_gradients_are_averaged_with_those_of_the_closing_micro_batch_or_without_any(
    kind: str, reached: list[str], clear: bool, expected: tuple[float, float]
) -> None:
    """Train two models for a window, of which the loss of each micro-batch reaches those that `reached` names."""
    backend, models = ddp(accumulation=len(reached)), [Answering(kind), Answering(kind)]
    prepared = backend.prepare(models, [SGD(model.parameters(), lr=1.0) for model in models], [])
    for names in reached:
        backend.window.begin()
        with held(backend, prepared):
            x = torch.tensor([[1.0 + dist.get_rank()]])
            outputs = {name: answer(one.model(x)) for name, one in zip("ab", prepared, strict=True)}
            backend.backward(sum(outputs[name].sum() for name in names))
    if clear:
        prepared[1].optimizers[0].zero_grad()
    for one in prepared:
        one.optimizers[0].step()
    assert tuple(-model.weight.item() for model in models) == expected  # the gradient of each


@pytest.mark.ranks(2)
def test_a_window_that_closes_without_a_backward_is_averaged() -> None:
    backend, model, prepared = prepare_sgd(ddp(accumulation=2), Answering("tensor"), lr=1.0)
    backend.window.begin()
    with prepared.no_sync():
        prepared.backward(prepared.model(torch.full((1, 1), 1.0 + dist.get_rank())).sum())
    backend.window.begin()
    prepared.optimizers[0].step()
    assert model.weight.item() == -0.75


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reduce", [None, "at_close"])
def test_gradients_lent_are_those_of_all_ranks_whatever_the_reducer_saw(reduce: str | None) -> None:
    torch.manual_seed(0)
    backend, model, plain = ddp(reduce=reduce), nn.Linear(3, 1), nn.Linear(3, 1)
    plain.load_state_dict(model.state_dict())
    (prepared,) = backend.prepare([model], [], [])
    optimizers = [SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    for step in range(3):
        losses = []
        for rank in range(2):
            output = plain(torch.full((2, 3), float(step + rank))).mean()
            losses.append(plain(torch.full((2, 3), 1.0 + rank)).square().mean() + output + output * rank)
        plain_step(optimizers[1], sum(losses) / 2)
        with prepared.no_sync():
            backend.backward_alone(prepared.model(torch.full((2, 3), 1.0 + dist.get_rank())).square().mean())
        output = prepared.model(torch.full((2, 3), float(step + dist.get_rank()))).mean()
        backend.backward_alone(output, options=BackwardOptions(retain_graph=True))
        backend.backward_alone(output * dist.get_rank())  # which the reducer does not see
        optimizers[0].step()
        optimizers[0].zero_grad()
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


@pytest.mark.ranks(2)
def test_a_foreign_loss_and_gradients_with_a_graph_are_refused() -> None:
    backend, model, foreign = ddp(), nn.Linear(1, 1), nn.Linear(1, 1)
    with pytest.raises(AccumulationError, match="before prepare"):
        backend.backward_alone(model(torch.ones(1, 1)).sum())
    (prepared,) = backend.prepare([model], [], [])
    with pytest.raises(PairingError, match="reaches no prepared model"):
        backend.backward_alone(foreign(torch.ones(1, 1)).sum())
    loss = prepared.model(torch.ones(1, 1)).sum()
    with pytest.raises(AccumulationError, match=r"create_graph=True\): DDP averages gradients in place"):
        backend.backward_alone(loss, options=BackwardOptions(create_graph=True))


def test_replicas_lend_their_gradients() -> None:
    assert issubclass(DDPBackend, SupportsManualSteps)
    assert not issubclass(SingleBackend, SupportsManualSteps)


NUM_WINDOWS = (2, 5)  # of each rank


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def loss_of(model: nn.Module, rank: int, step: int, micro_batch: int) -> torch.Tensor:
    x = torch.linspace(-1, 1, 8).reshape(2, 4) * (1 + rank) + 0.1 * step + 0.05 * micro_batch
    return model(x).float().square().mean()


def plain_weights(accumulation: int) -> torch.Tensor:
    model = linear()
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(max(NUM_WINDOWS)):
        ranks = [rank for rank, length in enumerate(NUM_WINDOWS) if length > step]
        losses = [loss_of(model, rank, step, i) for rank in ranks for i in range(accumulation)]
        plain_step(optimizer, torch.stack(losses).mean())
    return model.weight.detach()


UNEVEN = [
    *((mode, accumulation, {}) for mode in ("no", "fp16", "bf16") for accumulation in (1, 3)),
    ("no", 3, {"find_unused_parameters": True}),
    ("no", 3, {"gradient_as_bucket_view": False}),
    ("no", 3, {"bucket_size_mb": 0.00001}),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("mode", "accumulation", "settings"), UNEVEN)
def test_gradients_are_the_mean_over_the_ranks_that_have_batches(
    mode: str, accumulation: int, settings: dict
) -> None:
    precision = PrecisionSettings(initial_scale=256.0)
    options = {"accumulation": accumulation, "on_nonfinite": "raise", "precision": precision}
    backend, model, prepared = prepare_sgd(ddp(mode, **options, **settings), linear())
    rank = dist.get_rank()
    with backend.join([prepared.model]):
        for step in range(NUM_WINDOWS[rank]):
            for i in range(accumulation):
                backend.window.begin()
                with held(backend, [prepared]):
                    prepared.backward(loss_of(prepared.model, rank, step, i))
                step_and_clear(prepared)
        with pytest.raises(AccumulationError, match="inside join_uneven_inputs"):
            prepared.backward(loss_of(prepared.unwrap(), 0, 0, 0), count=1)
    assert prepared.optimizers[0].num_steps == NUM_WINDOWS[rank]
    tolerance = {"no": 1e-6, "fp16": 5e-3, "bf16": 3e-2}[mode]
    torch.testing.assert_close(model.weight.detach(), plain_weights(accumulation), atol=tolerance, rtol=0)
    assert_same_on_all_ranks(model.weight.detach())  # the ranks that ended take what the last one has
