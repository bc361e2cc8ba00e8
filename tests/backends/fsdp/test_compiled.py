"""Sharded models compiled as a whole: as many graphs as torch's own sharding leaves, and the same training."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD

from backends.graphs import Graphs
from plain_loop.backends import fsdp, step_and_clear
from plain_loop.stack import Stack, stack, tokens


def by_hand(graphs: Graphs) -> None:
    model = stack()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    compiled = torch.compile(model, backend=graphs)
    for step in range(3):
        compiled(tokens(step)).square().mean().backward()


def as_it_is(model: Stack, graphs: Graphs) -> nn.Module:
    return model


def whole(model: Stack, graphs: Graphs) -> nn.Module:
    return torch.compile(model, backend=graphs)


def whole_and_called(model: Stack, graphs: Graphs) -> nn.Module:
    compiled = torch.compile(model, backend=Graphs())
    compiled(tokens(0)).sum().backward()
    model.zero_grad()
    torch.compiler.reset()
    return torch.compile(model, backend=graphs)


def in_place(model: Stack, graphs: Graphs) -> nn.Module:
    model.compile(backend=graphs)
    return model


def train(
    when: str, how: Callable[[Stack, Graphs], nn.Module], mode: str, graphs: Graphs
) -> dict[str, object]:
    torch.compiler.reset()
    backend = fsdp(mode)
    model = given = stack()
    if when == "before":
        given = how(model, graphs)
    (prepared,) = backend.prepare([given], [SGD(model.parameters(), lr=0.1)], [])
    run = how(model, graphs) if when == "after" else prepared.model
    losses: list[float] = []
    for step in range(3):
        loss = run(tokens(step)).float().square().mean()
        prepared.backward(loss)
        prepared.clip(norm=0.5)
        step_and_clear(prepared)
        losses.append(loss.item())
    state = prepared.state_dict()
    prepared.load_state_dict(state)
    found = {"losses": losses, "names": list(state["model"]), "same": prepared.unwrap() is given}
    backend.close()
    return found


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("when", "how"),
    [
        *(("before", how) for how in (whole, whole_and_called, in_place)),
        *(("after", how) for how in (whole, in_place)),
    ],
)
@pytest.mark.parametrize("mode", ["no", "bf16"])
def test_a_model_compiled_as_a_whole_has_the_graphs_of_torchs_own_sharding_and_trains_alike(
    mode: str, when: str, how: Callable[[Stack, Graphs], nn.Module]
) -> None:
    plain = train("before", as_it_is, mode, Graphs())
    found = train(when, how, mode, graphs := Graphs())
    torch.compiler.reset()
    by_hand(expected := Graphs())
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-3)
    assert found["names"] == plain["names"]
    assert found["same"]
    assert (graphs.num_graphs, graphs.num_calls) == (expected.num_graphs, expected.num_calls)
    assert graphs.num_graphs >= 1
