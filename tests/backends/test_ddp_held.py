"""Gradients that DDP holds back for the micro-batch that closes a window: averaged there, or not stepped on."""

from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from drivetrain_backends import AccumulationError, AccumulationWindow, DDPBackend
from drivetrain_precision import choose_policy
from drivetrain_state import StateSettings, connect


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


def train(kind: str, reached: list[str], clear: bool = False) -> tuple[float, float, str]:
    """Train two models for a window; `reached` says which of them the loss of each micro-batch reaches.

    Returns:
        How far they moved, which is the gradient, and what an error said.
    """
    context = connect(StateSettings(device="cpu", watchdog=False))
    window = AccumulationWindow(len(reached))
    backend = DDPBackend(context, choose_policy("no", context.device), window=window)
    models = [Answering(kind), Answering(kind)]
    prepared = backend.prepare(models, [SGD(model.parameters(), lr=1.0) for model in models], [])
    said = ""
    for names in reached:
        window.begin()
        with ExitStack() as held:
            for one in prepared if not window.closing else ():
                held.enter_context(one.no_sync())
            x = torch.tensor([[1.0 + dist.get_rank()]])
            outputs = {name: answer(one.model(x)) for name, one in zip("ab", prepared, strict=True)}
            backend.backward(sum(outputs[name].sum() for name in names))
    if clear:
        prepared[1].optimizers[0].zero_grad()
    try:
        for one in prepared:
            one.optimizers[0].step()
    except AccumulationError as error:
        said = str(error)
        with pytest.raises(AccumulationError, match="held back"):
            prepared[1].optimizers[0].step()  # a second time neither
    backend.close()
    return -models[0].weight.item(), -models[1].weight.item(), said


@pytest.mark.parametrize("kind", ["tensor", "dict", "dataclass"])
def test_a_model_that_the_closing_micro_batch_does_not_train_is_not_stepped_unaveraged(
    run_ranks, kind: str
) -> None:
    for a, b, said in run_ranks(train, kind, ["ab", "a"]):
        assert (a, b) == (1.5, 0.0)
        assert said.startswith("the window closed without a backward of Answering")


@pytest.mark.parametrize("kind", ["tensor", "dict", "dataclass", "object"])
@pytest.mark.parametrize(
    ("reached", "expected"),
    [(["ab", "ab"], (1.5, 1.5)), (["a", "ab"], (1.5, 0.75)), (["a", "a"], (1.5, 0.0))],
)
def test_held_gradients_are_averaged_with_those_of_the_closing_micro_batch(
    run_ranks, kind: str, reached: list[str], expected: tuple[float, float]
) -> None:
    for a, b, said in run_ranks(train, kind, reached):
        assert (a, b, said) == (*expected, "")


def test_held_gradients_that_are_dropped_are_in_nobodys_way(run_ranks) -> None:
    for a, b, said in run_ranks(train, "tensor", ["ab", "a"], True):
        assert (a, b, said) == (1.5, 0.0, "")


def skip_the_closing_backward() -> str:
    context = connect(StateSettings(device="cpu", watchdog=False))
    window = AccumulationWindow(2)
    backend = DDPBackend(context, choose_policy("no", context.device), window=window)
    model = Answering("tensor")
    (prepared,) = backend.prepare([model], [SGD(model.parameters(), lr=1.0)], [])
    window.begin()
    with prepared.no_sync():
        prepared.backward(prepared.model(torch.ones(1, 1)).sum())
    window.begin()
    try:
        prepared.optimizers[0].step()
    except AccumulationError as error:
        return str(error)
    finally:
        backend.close()
    return "stepped"


def test_a_window_that_closes_without_a_backward_is_not_stepped(run_ranks) -> None:
    for said in run_ranks(skip_the_closing_backward):
        assert "Let the last micro-batch of a window run backward" in said
