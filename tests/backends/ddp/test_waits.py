"""The moment between a rank's own backward and its wait for the others, which DDP tells."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from drivetrain_backends import BackendRegistry, SupportsWaitWatch
from plain_loop.backends import ddp, held, step_and_clear


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


class Two(nn.Module):
    """Two layers of one weight, or of which a forward uses the first."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.first, self.second, self.tied = nn.Linear(4, 4), nn.Linear(4, 4), tied
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) if self.tied else self.first(x)


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    return model


KINDS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], int]] = {
    "plain": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {}, 1),
    "accumulated": (lambda: nn.Linear(4, 4), {}, 2),
    "frozen": (frozen, {}, 1),
    "tied": (partial(Two, tied=True), {}, 1),
    "unused": (partial(Two, tied=False), {"find_unused_parameters": True}, 1),
    "static": (lambda: nn.Linear(4, 4), {"static_graph": True}, 1),
    "compressed": (lambda: nn.Linear(4, 4), {"communication_hook": "bf16"}, 1),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_tells_that_it_has_computed_before_it_waits(kind: str, tmp_path: Path) -> None:
    """Rank 1's backwards wait until rank 0's call says that it has computed."""
    make, settings, length = KINDS[kind]
    backend, rank = ddp(accumulation=length, **settings), dist.get_rank()
    store = dist.FileStore(str(tmp_path / "store"), 2)
    told: list[int] = []
    calls: list[int] = []  # so far, after each micro-batch

    def on_computed() -> None:
        told.append(len(told))
        if rank == 0:
            store.set(f"step {len(told)}", "computed")

    def wait_for_other() -> None:
        if rank == 1:  # in vain if the call came only after the wait for this rank
            store.wait([f"step {len(told) + 1}"], timedelta(seconds=20))

    backend.watch_waits(on_computed)
    model = make()
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    (prepared,) = backend.prepare([model], [optimizer], [])
    for _ in range(3 * length):
        backend.window.begin(is_last=False)
        with held(backend, [prepared]):
            output = prepared.model(torch.ones(2, 4))
            if backend.window.closing:
                output = Late.apply(output, wait_for_other)
            prepared.backward(output.sum())
        calls.append(len(told))
        step_and_clear(prepared)
    assert calls == ([0, 1, 1, 2, 2, 3] if length == 2 else [1, 2, 3])


@pytest.mark.ranks(2)
def test_each_backward_of_several_models_tells_once_until_nobody_asks() -> None:
    backend, models, told = ddp(), [nn.Linear(4, 4), nn.Linear(4, 4)], list[int]()
    first, second = backend.prepare(models, [SGD(m.parameters(), lr=0.1) for m in models], [])
    backend.watch_waits(lambda: told.append(1))
    x = torch.ones(2, 4)
    for expected, trained in enumerate(([first], [second], [first, second]), start=1):
        backend.backward_of(trained, sum(one.model(x).sum() for one in trained))
        assert len(told) == expected
        for one in (first, second):
            one.optimizers[0].zero_grad()
    backend.watch_waits(None)
    first.backward(first.model(x).sum())
    assert len(told) == 3


def test_of_all_backends_those_of_replicas_alone_wait_at_the_end_of_backward_and_tell() -> None:
    registry = BackendRegistry()
    telling = {name for name in registry.names() if issubclass(registry.get(name), SupportsWaitWatch)}
    assert telling - {"megatron"} == {"ddp"}  # whose layers are trained as replicas
