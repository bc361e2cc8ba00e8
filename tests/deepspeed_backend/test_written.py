"""What is written, frozen or left out between steps, against a plain loop: right, or an error before the step."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from deepspeed_backend.engines import Weights, backend, error_of
from drivetrain_backends import AccumulationError, full_state_dict

SLOW = pytest.mark.slow


class Branches(nn.Module):
    """Two linear maps of (n, 4), of which `branch` chooses one, and another of both that ends in (n, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.end = nn.Linear(4, 1)

    def forward(self, x: Tensor, branch: int | None = None) -> Tensor:
        """Map (n, 4) to (n, 1)."""
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


def trained(one: Any, change: Callable[[nn.Module, int], None], branches: bool = False) -> float:
    """How far training is from a plain loop in fp32 that changes its model likewise."""
    torch.manual_seed(0)
    model = Branches()
    plain = copy.deepcopy(model)
    (prepared,) = one.prepare([model], [SGD(model.parameters(), lr=0.1, momentum=0.9)], [])
    reference = SGD(plain.parameters(), lr=0.1, momentum=0.9)
    rank, world_size = one.context.topology.rank, one.context.topology.world_size
    for step in range(4):
        x = torch.randn(world_size, 4, 4, generator=torch.Generator().manual_seed(step))
        chosen = [i % 2 if branches else None for i in range(world_size)]
        change(prepared.unwrap(), step)
        change(plain, step)
        one.window.begin()
        prepared.backward(prepared.model(x[rank], chosen[rank]).float().square().mean())
        prepared.optimizers[0].step()
        prepared.optimizers[0].zero_grad()
        reference.zero_grad()
        sum(plain(x[i], chosen[i]).square().mean() / world_size for i in range(world_size)).backward()  # pyright: ignore[reportAttributeAccessIssue]
        reference.step()
    found = full_state_dict(prepared.state_dict()["model"])
    return max(float((found[key] - value).abs().max()) for key, value in plain.state_dict().items())


def nothing(model: nn.Module, step: int) -> None:
    del model, step


def written(mode: str, settings: dict[str, Any]) -> dict[str, float]:
    apart: dict[str, float] = {}
    for name, change in {"nothing": nothing, **WRITES}.items():
        with backend(mode=mode, **settings) as one:
            apart[name] = trained(one, change)
    return apart


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
    run_ranks, mode: str, settings: dict[str, Any]
) -> None:
    for apart in run_ranks(written, mode, settings, num_processes=2, timeout_seconds=170):
        assert max(apart.values()) < (1e-6 if mode == "no" else 0.03), apart


def versions_of_masters(stage: int) -> list[int]:
    """How often a look at an untouched model has written into what the optimizer steps."""
    with backend(stage=stage) as one:
        model = Branches()
        (prepared,) = one.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
        train(one, prepared, torch.ones(4, 4))
        (master,) = prepared.engine.optimizer.single_partition_of_fp32_groups
        versions = [master._version]
        prepared.state_dict()
        with prepared.gathered():
            versions.append(master._version)
        return versions


def test_a_look_at_untouched_values_writes_nothing_that_a_save_may_be_copying(run_ranks) -> None:
    for before, after in run_ranks(versions_of_masters, 2, num_processes=1):
        assert before == after


def branching(stage: int) -> list[object]:
    """In stages 0 and 1 how far training is from a plain loop, else what is said on a rank."""
    with backend(stage=stage) as one:
        if stage < 2:
            return [trained(one, nothing, branches=True)]
        return [error_of(AccumulationError, lambda: trained(one, nothing, branches=True))]


@pytest.mark.parametrize("stage", [1, 2, pytest.param(0, marks=SLOW), pytest.param(3, marks=SLOW)])
def test_ranks_in_other_branches_train_right_or_are_refused_on_all_ranks(run_ranks, stage: int) -> None:
    for (found,) in run_ranks(branching, stage, num_processes=2):
        if stage < 2:
            assert found < 1e-6
        else:
            assert "reached other parameters on some ranks" in found
            assert "rank 0 has maps.0.weight" in found.replace("maps.0.bias, ", "")
            assert "rank 1 has maps.1.weight" in found.replace("maps.1.bias, ", "")


def train(
    one: Any, prepared: Any, x: Tensor, *args: Any, edit: Callable[[nn.Module], object] | None = None
) -> None:
    one.window.begin()
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


def refusals(stage: int) -> dict[str, str]:
    said: dict[str, str] = {}
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    with backend(stage=stage) as one:
        model = Branches()
        (prepared,) = one.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
        train(one, prepared, x)
        said["edited"] = error_of(AccumulationError, lambda: train(one, prepared, x, edit=halved))
        model.zero_grad()
        prepared.optimizers[0].zero_grad()
        for name, edit in (("clipped", clipped), ("cleared", nn.Module.zero_grad)):
            said[name] = error_of(AccumulationError, lambda edit=edit: train(one, prepared, x, edit=edit))
            prepared.optimizers[0].zero_grad()
        before = full_state_dict(prepared.state_dict()["model"])["end.bias"].clone()
        train(one, prepared, x)
        assert not torch.equal(full_state_dict(prepared.state_dict()["model"])["end.bias"], before)

        def penalised() -> None:
            inputs = x.clone().requires_grad_()
            torch.autograd.grad(prepared.model(inputs).sum(), inputs, create_graph=True)

        said["penalty"] = error_of(AccumulationError, penalised)
    with backend(stage=stage) as one:
        model = Branches()
        (prepared,) = one.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
        train(one, prepared, x)
        if stage:
            said["left out"] = error_of(AccumulationError, lambda: train(one, prepared, x, 0))
            prepared.optimizers[0].zero_grad()
        model.maps[1].requires_grad_(False)
        before = model.maps[1].weight.detach().clone()
        if stage:
            said["frozen"] = error_of(AccumulationError, lambda: train(one, prepared, x))
        else:
            train(one, prepared, x)
            assert torch.equal(before, model.maps[1].weight)
    return said


@pytest.mark.parametrize(
    "stage", [2, pytest.param(0, marks=SLOW), pytest.param(1, marks=SLOW), pytest.param(3, marks=SLOW)]
)
def test_what_an_engine_would_do_otherwise_than_a_plain_loop_is_refused_before_the_step(
    run_ranks, stage: int
) -> None:
    expected = {
        **dict.fromkeys(
            ("edited", "clipped", "cleared"), "the gradients of Branches were changed, set or dropped"
        ),
        "penalty": "torch.autograd.grad() went through Branches, whose DeepSpeed engine",
        "left out": "maps.1.weight, maps.1.bias: reached by no loss of this window, on any rank",
        "frozen": "maps.1.weight, maps.1.bias: frozen since prepare()",
    }
    for said in run_ranks(refusals, stage, num_processes=2):
        assert set(said) == (set(expected) if stage else {"edited", "clipped", "cleared", "penalty"})
        for name, message in said.items():
            assert message.startswith(expected[name]), name


def written_in_stage_3() -> list[object]:
    with backend(stage=3) as one:
        model = Weights()
        (prepared,) = one.prepare([model], [SGD([model.w], lr=1.0)], [])
        x = torch.tensor([1.0, 2.0, 3.0])
        for _ in range(2):
            one.window.begin()
            prepared.backward(prepared.model(x))
            prepared.optimizers[0].step()
            prepared.optimizers[0].zero_grad()
        with prepared.gathered(write=True), torch.no_grad():
            model.w.fill_(5.0)
        one.window.begin()
        prepared.backward(prepared.model(x))
        prepared.optimizers[0].step()
        prepared.optimizers[0].zero_grad()
        held = full_state_dict(prepared.state_dict()["model"])["w"].tolist()
        with torch.no_grad():
            model.w.clamp_(-0.1, 0.1)
        one.window.begin()
        prepared.backward(prepared.model(x))
        return [held, error_of(AccumulationError, prepared.optimizers[0].step)]


def test_stage_3_takes_what_is_written_while_gathered_and_refuses_the_rest(run_ranks) -> None:
    for held, said in run_ranks(written_in_stage_3, num_processes=2):
        assert held == [4.0, 3.0, 2.0]
        assert str(said).startswith("w: written in place since the last step")


class Choosy(nn.Linear):
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        yield self.bias


def written_of_a_choosy_model() -> list[float]:
    with backend(stage=1) as one:
        model = Choosy(2, 1)
        model.weight.requires_grad_(False)
        (prepared,) = one.prepare([model], [SGD(model.parameters(), lr=1.0)], [])
        with prepared.gathered(write=True), torch.no_grad():
            for weight in (model.weight, model.bias):
                weight.fill_(1.0 + dist.get_rank())
        held = full_state_dict(prepared.state_dict()["model"])
        return [*held["weight"][0].tolist(), held["bias"].item()]


def test_what_rank_0_writes_reaches_weights_that_a_parameters_of_the_model_leaves_out(run_ranks) -> None:
    for held in run_ranks(written_of_a_choosy_model, num_processes=2):
        assert held == [1.0, 1.0, 1.0]


def odd_layouts() -> dict[str, str]:
    said: dict[str, str] = {}
    models = {
        "channels_last": nn.Sequential(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last),  # pyright: ignore[reportCallIssue, reportArgumentType]
        "transposed": nn.Sequential(nn.Linear(3, 4)),
        "sparse": nn.Sequential(nn.Embedding(4, 3, sparse=True)),
        "complex": nn.Sequential(nn.Linear(3, 4, dtype=torch.complex64)),
    }
    models["transposed"][0].weight.data = torch.randn(3, 4).T
    for stage in (0, 1, 2, 3):
        with backend(stage=stage) as one:
            for name, model in models.items():
                optimizer = SGD(model.parameters(), lr=0.1)
                found = error_of(ValueError, partial(one.prepare, [model], [optimizer], []))
                assert said.setdefault(name, found) == found
                assert type(model) is nn.Sequential
    return said


def test_parameters_that_cannot_be_laid_out_flat_are_refused_by_name_at_every_stage(run_ranks) -> None:
    (said,) = run_ranks(odd_layouts, num_processes=1)
    assert said["channels_last"].startswith("0.weight: not contiguous in memory")
    assert said["transposed"].startswith("0.weight: not contiguous in memory")
    assert said["sparse"].startswith("0.weight: of an embedding with sparse=True")
    assert said["complex"].startswith("0.weight, 0.bias: complex")


def written_on_one_rank(stage: int) -> str:
    """What a save says of writes that rank 0 alone made after the first step, which compares weights."""
    with backend(stage=stage) as one:
        model = Branches()
        (prepared,) = one.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
        before = full_state_dict(prepared.state_dict())
        for number in range(3):
            if number and one.context.topology.is_main:
                clamp(prepared.unwrap(), 0)
            one.window.begin()
            prepared.backward(prepared.model(torch.ones(2, 4)).square().mean())
            prepared.optimizers[0].step()
            prepared.optimizers[0].zero_grad()
        said = error_of(AccumulationError, prepared.state_dict)
        prepared.load_state_dict(before)
        prepared.state_dict()
        return said


@pytest.mark.parametrize("stage", [pytest.param(1, marks=SLOW), 2])
def test_a_write_on_one_rank_is_told_by_the_save(run_ranks, stage: int) -> None:
    for said in run_ranks(written_on_one_rank, stage):
        assert (
            "maps.0.weight, maps.0.bias, maps.1.weight, maps.1.bias, end.weight: written in place on some"
            in said
        )
        assert "2 times on rank 0, 0 times on rank 1" in said
