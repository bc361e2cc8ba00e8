"""Gradients of replicas: held back for a window, lent to a program, and of ranks that run out of batches."""

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from backends.replicas import ddp_backend, plain_step, prepare_sgd, step_and_clear
from drivetrain_backends import (
    AccumulationError,
    BackwardOptions,
    DDPBackend,
    PairingError,
    SingleBackend,
    SupportsManualSteps,
)
from drivetrain_precision import PrecisionSettings


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


def train(kind: str, reached: list[str], clear: bool = False) -> tuple[float, float]:
    """Train two models for a window; `reached` says which of them the loss of each micro-batch reaches.

    Returns:
        How far they moved, which is the gradient.
    """
    backend = ddp_backend(accumulation=len(reached))
    models = [Answering(kind), Answering(kind)]
    prepared = backend.prepare(models, [SGD(model.parameters(), lr=1.0) for model in models], [])
    for names in reached:
        backend.window.begin()
        with ExitStack() as held:
            for one in prepared if not backend.window.closing else ():
                held.enter_context(one.no_sync())
            x = torch.tensor([[1.0 + dist.get_rank()]])
            outputs = {name: answer(one.model(x)) for name, one in zip("ab", prepared, strict=True)}
            backend.backward(sum(outputs[name].sum() for name in names))
    if clear:
        prepared[1].optimizers[0].zero_grad()
    for one in prepared:
        one.optimizers[0].step()
    backend.close()
    return -models[0].weight.item(), -models[1].weight.item()


@pytest.mark.parametrize("kind", ["tensor", "dict", "dataclass", "object"])
@pytest.mark.parametrize(
    ("reached", "expected"),
    [
        (["ab", "ab"], (1.5, 1.5)),
        (["a", "ab"], (1.5, 0.75)),
        (["a", "a"], (1.5, 0.0)),
        (["ab", "a"], (1.5, 0.75)),
    ],
)
def test_held_gradients_are_averaged_with_those_of_the_closing_micro_batch_or_without_any(
    run_ranks, kind: str, reached: list[str], expected: tuple[float, float]
) -> None:
    for moved in run_ranks(train, kind, reached):
        assert moved == expected


def test_held_gradients_that_are_dropped_are_in_nobodys_way(run_ranks) -> None:
    for moved in run_ranks(train, "tensor", ["ab", "a"], True):
        assert moved == (1.5, 0.0)


def skip_the_closing_backward() -> float:
    backend, model, prepared = prepare_sgd(ddp_backend(accumulation=2), Answering("tensor"), lr=1.0)
    backend.window.begin()
    with prepared.no_sync():
        prepared.backward(prepared.model(torch.full((1, 1), 1.0 + dist.get_rank())).sum())
    backend.window.begin()
    prepared.optimizers[0].step()
    backend.close()
    return -model.weight.item()


def test_a_window_that_closes_without_a_backward_is_averaged(run_ranks) -> None:
    assert run_ranks(skip_the_closing_backward) == [0.75, 0.75]


def made(mode: str = "no", **settings: object) -> DDPBackend:
    return ddp_backend(mode, **settings)


def trained(reduce: str | None) -> torch.Tensor:
    backend = made(reduce=reduce)
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    (prepared,) = backend.prepare([model], [], [])
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(3):
        with prepared.no_sync():
            backend.backward_alone(prepared.model(torch.full((2, 3), 1.0 + dist.get_rank())).square().mean())
        output = prepared.model(torch.full((2, 3), float(step + dist.get_rank()))).mean()
        backend.backward_alone(output, options=BackwardOptions(retain_graph=True))
        backend.backward_alone(output * dist.get_rank())  # which the reducer does not see
        optimizer.step()
        optimizer.zero_grad()
    backend.close()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def expected() -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for rank in range(2):
            output = model(torch.full((2, 3), float(step + rank))).mean()
            loss = model(torch.full((2, 3), 1.0 + rank)).square().mean() + output + output * rank
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def refused() -> list[str]:
    said: list[str] = []
    backend = made()
    model, foreign = nn.Linear(1, 1), nn.Linear(1, 1)
    with pytest.raises(AccumulationError, match="before prepare"):
        backend.backward_alone(model(torch.ones(1, 1)).sum())
    (prepared,) = backend.prepare([model], [], [])
    for loss, options in (
        (foreign(torch.ones(1, 1)).sum(), BackwardOptions()),
        (prepared.model(torch.ones(1, 1)).sum(), BackwardOptions(create_graph=True)),
    ):
        try:
            backend.backward_alone(loss, options=options)
        except (PairingError, AccumulationError) as error:
            said.append(str(error))
    backend.close()
    return said


def test_gradients_are_those_of_all_ranks_whatever_the_reducer_saw(run_ranks) -> None:
    for reduce in (None, "at_close"):
        for found in run_ranks(trained, reduce):
            torch.testing.assert_close(found, expected())


def test_a_foreign_loss_and_gradients_with_a_graph_are_refused(run_ranks) -> None:
    for foreign, graph in run_ranks(refused):
        assert "reaches no prepared model" in foreign
        assert "backward(create_graph=True): DDP averages gradients in place" in graph


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


def trained_on_uneven_ranks(
    mode: str, accumulation: int, settings: dict[str, object]
) -> tuple[torch.Tensor, int]:
    precision = PrecisionSettings(initial_scale=256.0)
    ddp, model, prepared = prepare_sgd(
        ddp_backend(
            mode, accumulation=accumulation, nonfinite_gradients="raise", precision=precision, **settings
        ),
        linear(),
    )
    with ddp.join([prepared.model]):
        for step in range(NUM_WINDOWS[dist.get_rank()]):
            for i in range(accumulation):
                ddp.window.begin()
                with nullcontext() if ddp.window.closing else prepared.no_sync():
                    prepared.backward(loss_of(prepared.model, dist.get_rank(), step, i))
                step_and_clear(prepared)
        with pytest.raises(AccumulationError, match="inside join_uneven_inputs"):
            prepared.backward(loss_of(prepared.unwrap(), 0, 0, 0), count=1)
    ddp.close()
    return model.weight.detach().clone(), prepared.optimizers[0].num_steps


@pytest.mark.parametrize("mode", ["no", "fp16", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_gradients_are_the_mean_over_the_ranks_that_have_batches(
    run_ranks, mode: str, accumulation: int
) -> None:
    (first, few), (second, many) = run_ranks(trained_on_uneven_ranks, mode, accumulation, {})
    assert (few, many) == NUM_WINDOWS
    assert torch.equal(first, second)  # the ranks that ended take what the last one has
    tolerance = {"no": 1e-6, "fp16": 5e-3, "bf16": 3e-2}[mode]
    torch.testing.assert_close(first, plain_weights(accumulation), atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    "settings",
    [{"find_unused_parameters": True}, {"gradient_as_bucket_view": False}, {"bucket_size_mb": 0.00001}],
)
def test_other_settings_train_the_same_on_uneven_ranks(run_ranks, settings: dict[str, object]) -> None:
    (first, _), (second, _) = run_ranks(trained_on_uneven_ranks, "no", 3, settings)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, plain_weights(3), atol=1e-6, rtol=0)
