"""What is written, frozen or left out between steps, against a plain loop: right, or an error before the step."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from deepspeed_engines import X, backend, engine_of, take_step, weights
from drivetrain_backends import AccumulationError, full_state_dict
from plain_loop.case import Case, assert_equals_plain_loop, run_on_ranks

SLOW = pytest.mark.slow


class Branches(nn.Module):
    """Two linear maps of (n, 4), of which `branch` chooses one, and another of both that ends in (n, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.end = nn.Linear(4, 1)

    def forward(self, x: Tensor, branch: int | None = None) -> Tensor:
        return self.end(self.maps[0](x) + self.maps[1](x) if branch is None else self.maps[branch](x))


def clamp(model: nn.Module, step: int) -> None:
    del step
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.2, 0.2)


def clamp_data(model: nn.Module, step: int) -> None:
    del step
    for parameter in model.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def load(model: nn.Module, step: int) -> None:
    if step == 2:
        model.load_state_dict({k: torch.full_like(v, 0.25) for k, v in model.state_dict().items()})


def assign(model: nn.Module, step: int) -> None:
    if step == 2:
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector * 0.5, model.parameters())


WRITES: dict[str, Callable[[nn.Module, int], None]] = {
    "clamp_": clamp,
    "data.clamp_": clamp_data,
    "load_state_dict": load,
    "vector_to_parameters": assign,
}


def build() -> Branches:
    torch.manual_seed(0)
    return Branches()


def loss_of_batch(model: nn.Module, rank: int, number: int, *, branches: bool = False) -> Tensor:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * number + rank))
    return model(x, rank % 2 if branches else None).float().square().mean()


CASE = Case(build=build, loss=loss_of_batch, optimizer=partial(SGD, lr=0.1, momentum=0.9), steps=4)


def nothing(model: nn.Module, step: int) -> None:
    del model, step


@pytest.mark.ranks(2, timeout_seconds=170)
@pytest.mark.parametrize("name", ["nothing", *WRITES])
@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("no", {"stage": 2}),
        pytest.param("no", {"stage": 0}, marks=SLOW),
        pytest.param("no", {"stage": 1}, marks=SLOW),
        pytest.param("no", {"stage": 1, "offload_optimizer": "cpu"}, marks=SLOW),
        pytest.param("no", {"stage": 2, "offload_optimizer": "cpu"}, marks=SLOW),
        pytest.param("bf16", {"stage": 1}, marks=SLOW),
        pytest.param("bf16", {"stage": 2}, marks=SLOW),
        pytest.param("bf16", {"stage": 2, "offload_optimizer": "cpu"}, marks=SLOW),
    ],
)
def test_values_written_between_steps_are_what_the_next_step_moves(
    mode: str, settings: dict, name: str
) -> None:
    """Against a plain loop in fp32 that changes its model likewise."""
    case = replace(CASE, before_step=WRITES.get(name, nothing))
    with backend(mode=mode, **settings) as one:
        assert_equals_plain_loop(case, one, rtol=0, atol=1e-6 if mode == "no" else 0.03)


@pytest.mark.ranks(1)
def test_a_look_at_untouched_values_writes_nothing_that_a_save_may_be_copying() -> None:
    with engine_of(Branches(), stage=2, lr=0.1) as (_, _, prepared):
        train(prepared, torch.ones(4, 4))
        (master,) = prepared.engine.optimizer.single_partition_of_fp32_groups
        before = master._version
        prepared.state_dict()
        with prepared.gathered():
            assert master._version == before


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 2, pytest.param(0, marks=SLOW), pytest.param(3, marks=SLOW)])
def test_ranks_in_other_branches_train_right_or_are_refused_on_all_ranks(stage: int) -> None:
    case = replace(CASE, loss=partial(loss_of_batch, branches=True))
    with backend(stage=stage) as one:
        if stage < 2:
            assert_equals_plain_loop(case, one, rtol=0, atol=1e-6)
            return
        with pytest.raises(AccumulationError, match="reached other parameters on some ranks") as caught:
            run_on_ranks(case, one)
    said = str(caught.value)
    assert "rank 0 has maps.0.weight" in said.replace("maps.0.bias, ", "")
    assert "rank 1 has maps.1.weight" in said.replace("maps.1.bias, ", "")


def train(prepared: Any, x: Tensor, *args: Any, edit: Callable[[nn.Module], object] | None = None) -> None:
    prepared.backward(prepared.model(x, *args).square().mean())
    if edit is not None:
        edit(prepared.unwrap())
    prepared.optimizers[0].step()
    prepared.optimizers[0].zero_grad()


def halved(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def clipped(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


CHANGED = "^the gradients of Branches were edited after backward"


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "stage", [2, pytest.param(0, marks=SLOW), pytest.param(1, marks=SLOW), pytest.param(3, marks=SLOW)]
)
def test_what_an_engine_would_do_otherwise_than_a_plain_loop_is_refused_before_the_step(stage: int) -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    with engine_of(Branches(), stage=stage, lr=0.1) as (_, model, prepared):
        train(prepared, x)
        for edit in (halved, clipped, nn.Module.zero_grad):
            with pytest.raises(AccumulationError, match=CHANGED):
                train(prepared, x, edit=edit)
            model.zero_grad()
            prepared.optimizers[0].zero_grad()
        before = full_state_dict(prepared.state_dict()["model"])["end.bias"].clone()
        train(prepared, x)
        assert not torch.equal(full_state_dict(prepared.state_dict()["model"])["end.bias"], before)
        inputs = x.clone().requires_grad_()
        output = prepared.model(inputs).sum()
        said = r"^torch\.autograd\.grad\(\) went through Branches, whose DeepSpeed engine"
        with pytest.raises(AccumulationError, match=said):
            torch.autograd.grad(output, inputs, create_graph=True)
    with engine_of(Branches(), stage=stage, lr=0.1) as (_, model, prepared):
        train(prepared, x)
        if stage:
            said = r"^maps\.1\.weight, maps\.1\.bias: reached by no loss of this window, on any rank"
            with pytest.raises(AccumulationError, match=said):
                train(prepared, x, 0)
            prepared.optimizers[0].zero_grad()
        model.maps[1].requires_grad_(False)
        before = model.maps[1].weight.detach().clone()
        if stage:
            said = r"^maps\.1\.weight, maps\.1\.bias: frozen since prepare\(\)"
            with pytest.raises(AccumulationError, match=said):
                train(prepared, x)
        else:
            train(prepared, x)
            assert torch.equal(before, model.maps[1].weight)


@pytest.mark.ranks(2)
def test_stage_3_takes_what_is_written_while_gathered_and_refuses_the_rest() -> None:
    with engine_of(stage=3) as (_, model, prepared):
        for _ in range(2):
            take_step(prepared, prepared.model(X))
        with prepared.gathered(write=True), torch.no_grad():
            model.w.fill_(5.0)
        take_step(prepared, prepared.model(X))
        assert weights(prepared) == [4.0, 3.0, 2.0]
        with torch.no_grad():
            model.w.clamp_(-0.1, 0.1)
        prepared.backward(prepared.model(X))
        with pytest.raises(AccumulationError, match=r"^w: written in place since the last step"):
            prepared.optimizers[0].step()


class Choosy(nn.Linear):
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        yield self.bias


@pytest.mark.ranks(2)
def test_what_rank_0_writes_reaches_weights_that_a_parameters_of_the_model_leaves_out() -> None:
    model = Choosy(2, 1)
    model.weight.requires_grad_(False)
    with engine_of(model, stage=1) as (_, _, prepared):
        with prepared.gathered(write=True), torch.no_grad():
            for weight in (model.weight, model.bias):
                weight.fill_(1.0 + dist.get_rank())
        held = full_state_dict(prepared.state_dict()["model"])
        assert [*held["weight"][0].tolist(), held["bias"].item()] == [1.0, 1.0, 1.0]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_that_cannot_be_laid_out_flat_are_refused_by_name_at_every_stage(stage: int) -> None:
    transposed = nn.Sequential(nn.Linear(3, 4))
    transposed[0].weight.data = torch.randn(3, 4).T
    with backend(stage=stage) as one:
        for model, said in (
            (
                nn.Sequential(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last),
                "not contiguous in memory",
            ),  # pyright: ignore
            (transposed, "not contiguous in memory"),
            (nn.Sequential(nn.Embedding(4, 3, sparse=True)), "of an embedding with sparse=True"),
            (nn.Sequential(nn.Linear(3, 4, dtype=torch.complex64)), "complex"),
        ):
            optimizer = SGD(model.parameters(), lr=0.1)
            with pytest.raises(ValueError, match=rf"^0\.weight(, 0\.bias)?: {said}"):
                one.prepare([model], [optimizer], [])
            assert type(model) is nn.Sequential


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [pytest.param(1, marks=SLOW), 2])
def test_a_write_on_one_rank_is_told_by_the_save(stage: int) -> None:
    """After the first step, which compares weights, rank 0 alone writes."""
    with engine_of(Branches(), stage=stage, lr=0.1) as (_, _, prepared):
        before = full_state_dict(prepared.state_dict())
        for number in range(3):
            if number and dist.get_rank() == 0:
                clamp(prepared.unwrap(), 0)
            train(prepared, torch.ones(2, 4))
        said = "maps.0.weight, maps.0.bias, maps.1.weight, maps.1.bias, end.weight: written in place on some"
        with pytest.raises(AccumulationError, match=said) as caught:
            prepared.state_dict()
        assert "2 times on rank 0, 0 times on rank 1" in str(caught.value)
        prepared.load_state_dict(before)
        prepared.state_dict()
