"""The moment between a rank's own backward and its wait for the others, which DDP tells."""

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from backends.replicas import ddp_backend
from drivetrain_backends import DDPBackend, SingleBackend, SupportsWaitWatch


class Late(torch.autograd.Function):
    """The identity, whose backward calls a function first."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, before: Callable[[], None]) -> Tensor:
        ctx.before = before
        return input.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.before()
        return gradient, None


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Branches(nn.Module):
    """Two layers, of which a forward uses the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x)


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    return model


KINDS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], int]] = {
    "plain": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {}, 1),
    "accumulated": (lambda: nn.Linear(4, 4), {}, 2),
    "frozen": (frozen, {}, 1),
    "tied": (Tied, {}, 1),
    "unused": (Branches, {"find_unused_parameters": True}, 1),
    "static": (lambda: nn.Linear(4, 4), {"static_graph": True}, 1),
    "compressed": (lambda: nn.Linear(4, 4), {"communication_hook": "bf16"}, 1),
}


def backend_of(settings: dict[str, Any], length: int) -> DDPBackend:
    return ddp_backend(accumulation=length, **settings)


def train_with_a_late_rank(kind: str, folder: str) -> list[int]:
    """Train where rank 1's backwards wait until rank 0's call says that it has computed.

    Returns:
        The number of calls so far, after each micro-batch.
    """
    make, settings, length = KINDS[kind]
    backend = backend_of(settings, length)
    store = dist.FileStore(f"{folder}/{kind}", 2)
    told: list[int] = []
    calls: list[int] = []

    def on_computed() -> None:
        told.append(len(told))
        if dist.get_rank() == 0:
            store.set(f"step {len(told)}", "computed")

    def wait_for_other() -> None:
        if dist.get_rank() == 1:  # in vain if the call came only after the wait for this rank
            store.wait([f"step {len(told) + 1}"], timedelta(seconds=20))

    backend.watch_waits(on_computed)
    model = make()
    trained = [p for p in model.parameters() if p.requires_grad]
    (prepared,) = backend.prepare([model], [SGD(trained, lr=0.1)], [])
    for _ in range(3 * length):
        backend.window.begin(is_last=False)
        closing = backend.window.closing
        with nullcontext() if closing else prepared.no_sync():
            output = prepared.model(torch.ones(2, 4))
            if closing:
                output = Late.apply(output, wait_for_other)
            prepared.backward(output.sum())
        calls.append(len(told))
        prepared.step(prepared.optimizers[0].optimizer)
        prepared.zero_grad(prepared.optimizers[0].optimizer)
    backend.close()
    return calls


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_tells_that_it_has_computed_before_it_waits(run_ranks, kind: str, tmp_path) -> None:
    expected = [0, 1, 1, 2, 2, 3] if kind == "accumulated" else [1, 2, 3]
    assert run_ranks(train_with_a_late_rank, kind, str(tmp_path)) == [expected] * 2


def train_two_models() -> list[int]:
    backend = backend_of({}, 1)
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    first, second = backend.prepare(models, [SGD(m.parameters(), lr=0.1) for m in models], [])
    told: list[int] = []
    calls: list[int] = []
    backend.watch_waits(lambda: told.append(1))
    x = torch.ones(2, 4)
    for losses in (["first"], ["second"], ["both"]):
        backend.window.begin_alone()
        if losses == ["both"]:
            backend.backward_of([first, second], first.model(x).sum() + second.model(x).sum())
        else:
            one = first if losses == ["first"] else second
            one.backward(one.model(x).sum())
        calls.append(len(told))
        for one in (first, second):
            one.zero_grad(one.optimizers[0].optimizer)
    backend.watch_waits(None)
    backend.window.begin_alone()
    first.backward(first.model(x).sum())
    calls.append(len(told))
    backend.close()
    return calls


def test_each_backward_of_several_models_tells_once_until_nobody_asks(run_ranks) -> None:
    assert run_ranks(train_two_models) == [[1, 2, 3, 3]] * 2


def test_only_backends_whose_waits_lie_at_the_end_of_backward_tell_them() -> None:
    assert issubclass(DDPBackend, SupportsWaitWatch)
    assert not issubclass(SingleBackend, SupportsWaitWatch)
