"""What an engine cannot do is refused in drivetrain's own words, at `prepare` or at the call."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from deepspeed_engines import backend, engine_of, take_step, told
from drivetrain_backends import AccumulationError, full_state_dict

SLOW = pytest.mark.slow


class Seq(nn.Module):
    """Three linear maps of (n, 8), the second of which may be of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).to(next(self.b.parameters()).dtype)
        return self.c(self.b(hidden).to(next(self.c.parameters()).dtype))


class Looked(nn.Module):
    """Rows of a table that a forward bounds in place."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(40, 8, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.embedding(x, self.w, max_norm=1.0).mean(1)


def unprepared(stage: int) -> dict[str, nn.Module]:
    """Models that `prepare` refuses."""
    lazy, mixed, compiled, bounded = Seq(), Seq(), Seq(), Seq()
    lazy.a = nn.LazyLinear(8)  # pyright: ignore[reportAttributeAccessIssue]
    mixed.b.bfloat16()
    bounded.a = nn.Embedding(4, 8, max_norm=1.0)  # pyright: ignore[reportAttributeAccessIssue]
    found = {"lazy": lazy, "mixed": mixed, "max_norm": bounded, "parallel": nn.DataParallel(Seq())}
    if stage == 3:
        compiled.b = torch.compile(compiled.b, backend="eager")  # pyright: ignore[reportAttributeAccessIssue]
        found["compiled"] = compiled
    return found


def each_own(model: nn.Module, optimizer: Optimizer) -> None:
    for p in model.parameters():
        own = SGD([p], lr=0.1)
        p.register_post_accumulate_grad_hook(lambda _, own=own: own.step())


def in_hook(model: nn.Module, optimizer: Optimizer) -> None:
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: optimizer.step() and None)


def through_data(model: nn.Module, optimizer: Optimizer) -> None:
    def write(p: Any) -> None:
        p.data.add_(p.grad, alpha=-0.1)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(write)


CHANGES: dict[str, Callable[[Any, Any], object]] = {
    "own optimizers": each_own,
    "step in hook": in_hook,
    "data in hook": through_data,
    "dtype": lambda m, _: m.double(),
    "dtype of a part": lambda m, _: m.b.bfloat16(),
    "new": lambda m, _: setattr(m, "extra", nn.Parameter(torch.ones(1))),
    "assigned": lambda m, _: setattr(m.a, "weight", nn.Parameter(torch.ones(8, 8))),
}


def train(prepared: Any, x: Tensor) -> None:
    for _ in range(2):
        take_step(prepared, prepared.model(x).float().square().mean())


def refusals(stage: int) -> dict[str, str]:
    said: dict[str, str] = {}
    x = torch.ones(4, 8)
    with backend(stage=stage) as one:
        for name, model in unprepared(stage).items():
            optimizer = SGD(model.parameters(), lr=0.1)
            said[name] = told(partial(one.prepare, [model], [optimizer], []))
    for name, change in CHANGES.items():
        with engine_of(Seq(), stage=stage, lr=0.1) as (_, _, prepared):

            def act(change: Any = change, prepared: Any = prepared, x: Tensor = x) -> None:
                change(prepared.unwrap(), prepared.optimizers[0])
                train(prepared, x)

            said[name] = told(partial(act, x=x.double() if name == "dtype" else x))
    with engine_of(Seq(), stage=stage, lr=0.1) as (_, model, prepared):
        run = torch.func.vmap(torch.func.jacrev(lambda v: prepared.model(v[None])[0, 0]))
        said["jacrev"] = told(lambda: run(x))
        said["grad"] = told(lambda: torch.autograd.grad(prepared.model(x).sum(), list(model.parameters())))
    with engine_of(Seq().bfloat16(), stage=stage, lr=0.1) as (_, _, prepared):
        said["half"] = told(lambda: prepared.model(x))
    with engine_of(Looked(), stage=stage, lr=0.1) as (one, _, prepared):
        draws = torch.Generator().manual_seed(one.context.topology.rank)
        said["written by rows"] = told(lambda: train(prepared, torch.randint(0, 40, (4, 4), generator=draws)))
    return said


def expected(stage: int) -> dict[str, str]:
    in_hook = (
        "changed while backward() ran: a hook steps there" if stage == 3 else "written during backward()"
    )
    converted = "divides it among ranks" if stage == 3 else "converted to another dtype after prepare()"
    return {
        "lazy": "ValueError: Seq: a.weight has no shape yet",
        "mixed": "a DeepSpeed engine trains weights of one dtype",
        "max_norm": "ValueError: a: Embedding(max_norm=1.0) scales the rows",
        "parallel": "ValueError: DataParallel averages or shards by itself",
        **({"compiled": "ValueError: b is wrapped by torch.compile"} if stage == 3 else {}),
        "own optimizers": in_hook,
        "data in hook": in_hook,
        "step in hook": "AccumulationError: the optimizer of Seq was called by a hook of its backward",
        "dtype": converted,
        "dtype of a part": converted,
        "new": "extra created or assigned",
        "assigned": "a.weight created or assigned",
        "jacrev": "AccumulationError: ",
        "grad": "AccumulationError: torch.autograd.grad() went through Seq",
        "half": "BatchMismatchError: the batch holds float32, the model's weights are bfloat16",
        "written by rows": "w: written in place since the last"
        if stage == 3
        else "w of Looked differs on ranks 1",
    }


@pytest.mark.ranks(2, timeout_seconds=170)
@pytest.mark.parametrize("stage", [pytest.param(1, marks=SLOW), 2, 3])
def test_what_an_engine_cannot_do_is_refused_by_name(stage: int) -> None:
    said, texts = refusals(stage), expected(stage)
    assert set(said) == set(texts)
    for name, text in texts.items():
        assert text in said[name], (name, said[name])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("stage", [2, 3, pytest.param(0, marks=SLOW), pytest.param(1, marks=SLOW)])
def test_a_layer_frozen_in_one_micro_batch_is_trained_by_the_other_or_named(stage: int, number: int) -> None:
    model = nn.Sequential(nn.Linear(3, 1, bias=False), nn.Linear(1, 1, bias=False))
    for layer in model:
        nn.init.ones_(layer.weight)  # pyright: ignore[reportArgumentType]

    def train_a_window() -> None:
        for micro in range(2):
            model[1].requires_grad_(micro != number)
            one.window.begin()
            prepared.backward(prepared.model(torch.ones(1, 3)).sum())
        model[1].requires_grad_(True)
        prepared.optimizers[0].step()

    with engine_of(model, stage=stage, accumulation=2) as (one, _, prepared):
        if stage == 3:
            with pytest.raises(AccumulationError, match=r"^1\.weight: frozen since prepare\(\)"):
                train_a_window()
        else:
            train_a_window()
            assert full_state_dict(prepared.state_dict()["model"])["1.weight"].item() == 1.0 - 3.0 / 2
