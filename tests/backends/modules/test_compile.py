"""Models compiled by torch.compile: as many graphs as without us, and the names of their plain twins."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from backends.graphs import Graphs
from drivetrain_backends import unwrap_compiled
from drivetrain_backends.modules.compile import strip_wrapper_prefix
from plain_loop.backends import ddp, step_and_clear, take_step
from plain_loop.backends import single as backend

# torch 2.15's compiler asks an activation for its gradient, and torch warns of that.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)

X = torch.linspace(-1, 1, 8).reshape(4, 2)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))


def compile_whole(model: nn.Sequential, graphs: Graphs | str = "eager") -> nn.Module:
    return torch.compile(model, backend=graphs, fullgraph=True)


def compile_in_place(model: nn.Sequential, graphs: Graphs | str = "eager") -> nn.Module:
    model.compile(backend=graphs, fullgraph=True)
    return model


def compile_regions(model: nn.Sequential, graphs: Graphs | str = "eager") -> nn.Module:
    model[0].compile(backend=graphs, fullgraph=True)
    model[2] = torch.compile(model[2], backend=graphs, fullgraph=True)
    return model


def as_it_is(model: nn.Sequential, graphs: Graphs | str = "eager") -> nn.Module:
    return model


WAYS = pytest.mark.parametrize("compiled", [compile_whole, compile_in_place, compile_regions])
MODES = pytest.mark.parametrize("mode", ["no", "bf16", "fp16"])


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def graphs_of(run: Callable[[torch.Tensor], torch.Tensor], graphs: Graphs) -> tuple[int, int]:
    for _ in range(2):
        run(X).float().sum().backward()
    return graphs.num_graphs, graphs.num_calls


@MODES
@WAYS
@pytest.mark.default_cases("compile_regions-bf16", "compile_in_place-no")
def test_a_model_compiled_before_prepare_has_the_graphs_it_has_alone(mode: str, compiled) -> None:
    alone = Graphs()
    expected = graphs_of(compiled(net(), alone), alone)
    torch.compiler.reset()
    graphs = Graphs()
    (prepared,) = backend(mode).prepare([compiled(net(), graphs)], [], [])
    assert graphs_of(prepared.model, graphs) == expected
    assert expected[0] >= 1


@MODES
@pytest.mark.parametrize("compiled", [compile_whole, compile_in_place])
@pytest.mark.default_cases("compile_in_place-bf16")
def test_a_model_compiled_after_prepare_is_one_graph(mode: str, compiled) -> None:
    (prepared,) = backend(mode).prepare([model := net()], [], [])
    graphs = Graphs()
    run = compiled(model, graphs)
    assert run(X).dtype is {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[mode]
    num_graphs, num_calls = graphs_of(run, graphs)
    assert (num_graphs, num_calls >= 3) == (1, True)
    assert prepared.unwrap() is model


def trained(compiled, mode: str = "no") -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    single = backend(mode, accumulation=2)
    model = compiled(net())
    (prepared,) = single.prepare([model], [AdamW(model.parameters(), lr=0.1)], [])
    assert prepared.unwrap() is model
    for _ in range(6):
        single.window.begin()
        prepared.backward(prepared.model(X).float().square().mean())
        prepared.clip(norm=0.5)
        step_and_clear(prepared)
    return dict(net().state_dict()), prepared.state_dict()


@WAYS
def test_a_compiled_model_is_saved_under_the_names_of_its_plain_twin(compiled) -> None:
    names, state = trained(compiled)
    _, plain = trained(as_it_is)
    assert list(state["model"]) == list(names)
    assert "_orig_mod" not in repr(state)
    for name, value in plain["model"].items():
        torch.testing.assert_close(state["model"][name], value)


@WAYS
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.default_cases("True-compile_regions")
def test_a_compiled_model_and_its_plain_twin_load_each_others_checkpoints(compiled, back: bool) -> None:
    source, target = (compiled, as_it_is) if back else (as_it_is, compiled)
    _, state = trained(source)
    model = target(net())
    (prepared,) = backend().prepare([model], [AdamW(model.parameters(), lr=0.1)], [])
    prepared.load_state_dict(copy.deepcopy(state))
    found = prepared.state_dict()
    for name, value in state["model"].items():
        assert torch.equal(found["model"][name], value)
    steps = {name: each["step"].item() for name, each in found["optimizers"][0]["state"].items()}
    assert set(steps.values()) == {3.0}
    assert set(steps) == set(state["model"])


def test_a_checkpoint_that_lacks_a_weight_is_refused_as_ever() -> None:
    _, state = trained(compile_whole)
    del state["model"]["2.bias"]
    model = compile_whole(net())
    (prepared,) = backend().prepare([model], [AdamW(model.parameters())], [])
    with pytest.raises(ValueError, match=r"missing \['2.bias'\]"):
        prepared.load_state_dict(state)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_prepared_compiled_model_is_the_plain_compiled_one(duplicate) -> None:
    model = compile_whole(net())
    kind = type(model)
    backend("bf16").prepare([model], [], [])
    other = duplicate(model)
    assert type(other) is kind
    assert other(X).dtype is torch.float32
    assert model(X).dtype is torch.bfloat16


def test_compiling_a_prepared_model_and_preparing_that_is_refused() -> None:
    single = backend()
    (prepared,) = single.prepare([net()], [], [])
    with pytest.raises(ValueError, match="Sequential is prepared already"):
        single.prepare([torch.compile(prepared.model, backend="eager")], [], [])


def test_names_and_modules_without_a_compiler_stay_as_they_are() -> None:
    model = net()
    assert unwrap_compiled(model) is model
    assert unwrap_compiled(torch.compile(model, backend="eager")) is model
    assert strip_wrapper_prefix("0.weight") == "0.weight"


def under_ddp(mode: str, model: nn.Module) -> nn.Module:
    (one,) = ddp(mode).prepare([model], [AdamW(model.parameters())], [])
    assert not any("_orig_mod" in name for name in one.state_dict()["model"])
    return one.model


@WAYS
@pytest.mark.parametrize("mode", ["no", "bf16"])
@pytest.mark.slow
@pytest.mark.ranks(2)
def test_ddp_adds_no_graph_break_of_ours(mode: str, compiled) -> None:
    alone, graphs = Graphs(), Graphs()
    expected = graphs_of(DistributedDataParallel(compiled(net(), alone)), alone)
    torch.compiler.reset()
    assert graphs_of(under_ddp(mode, compiled(net(), graphs)), graphs) == expected
    assert compiled is not compile_whole or expected == (1, 3)
    torch.compiler.reset()
    later = Graphs()
    num_graphs, num_calls = graphs_of(torch.compile(under_ddp(mode, net()), backend=later), later)
    assert (num_graphs, num_calls >= 3) == (1, True)  # DDP itself is not traced, the model is whole
    torch.compiler.reset()


@pytest.mark.ranks(2, timeout_seconds=30)
@pytest.mark.slow
def test_a_replica_compiled_later_joins_uneven_ranks() -> None:
    backend, model = ddp(), net()
    (prepared,) = backend.prepare([model], [AdamW(model.parameters())], [])
    compiled = torch.compile(prepared.model, backend="eager")
    with backend.join([compiled]):
        for _ in range(1 + backend.context.topology.rank):
            take_step(prepared, compiled(X).sum())
    assert prepared.optimizers[0].num_steps == 1 + backend.context.topology.rank
