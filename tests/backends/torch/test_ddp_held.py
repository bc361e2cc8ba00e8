"""Gradients that DDP holds back for the micro-batch that closes a window: averaged there, or at the close."""

from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from backends.replicas import ddp_backend, prepare_sgd


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
