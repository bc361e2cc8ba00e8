from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import register_backend

from drivetrain_backends import AccumulationWindow, AutoValue, FSDPBackend, FSDPSettings
from drivetrain_backends.settings import ModelSettings
from drivetrain_precision import PrecisionSettings, choose_policy
from drivetrain_state import ParallelDims, StateSettings, connect
from plain_loop.backends import fsdp, prepare_sgd, take_step, weights
from plain_loop.case import assert_equal, run_on_ranks, run_plain, train
from plain_loop.stack import CASE, Stack, stack, tokens


def applied(mode: str, options: dict[str, object]) -> dict[str, object]:
    backend = fsdp(mode, **options)
    backend.prepare([stack(depth=3)], [], [])
    found = dict(backend.applied())
    backend.close()
    return found


ASKED = {
    "strategy": "hybrid_shard",
    "shard_size": 1,
    "wrap": ("Embedding", "Block"),
    "upcast": True,
    "offload": True,
    "pin_memory": False,
    "prefetch": 2,
}


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_what_is_asked_for_is_read_back_from_the_modules() -> None:
    found = applied("bf16", ASKED)
    assert {name: found[name] for name in ASKED} == ASKED


@pytest.mark.ranks(1)
@pytest.mark.parametrize("upcast", [False, True])
def test_what_falls_short_of_what_was_asked_says_why(upcast: bool) -> None:
    backend = fsdp(wrap=("Block", "Embedding"), prefetch=5, upcast=upcast)
    backend.prepare([stack(tied=True).requires_grad_(upcast), nn.Linear(2, 2).requires_grad_(False)], [], [])
    found = backend.applied()
    assert found["wrap"] == AutoValue(
        value=("Block",), reason="embedding is left out, as it shares head.weight"
    )
    assert found["prefetch"] == AutoValue(value=2, reason="there are no more blocks")
    assert found["upcast"] is upcast  # though there was nothing to cast


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "hybrid_shard", "no_shard"])
def test_the_strategy_in_force_is_read_back(strategy: str) -> None:
    assert applied("no", {"strategy": strategy})["strategy"] == strategy


@pytest.mark.ranks(2)
def test_what_was_left_open_comes_with_its_reason() -> None:
    found = applied("fp16", {})
    assert found["strategy"] == AutoValue(value="full_shard", reason="what saves the most memory")
    assert found["shard_size"].value == 2
    assert found["wrap"] == AutoValue(value=("Block",), reason="the modules of its lists")
    assert found["reduce_dtype"].value == "fp32"
    assert found["upcast"].value is False  # it is fp32 already
    assert found["offload"] is False


def be_refused(kind: str) -> None:
    backend, model = fsdp(), stack()
    if kind == "size":
        fsdp(strategy="hybrid_shard", shard_size=3)
    elif kind == "join":
        backend.join([])
    elif kind == "shared":
        backend.prepare([model, nn.Sequential(model.head)], [], [])
    elif kind == "class":
        fsdp(wrap=("Blok",)).prepare([model], [], [])
    else:
        backend.prepare([model], [], [])
        if kind == "twice after close":
            backend.close()
            backend = fsdp()
        backend.prepare([model], [], [])


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("size", r"fsdp\.shard_size=3 with 2 processes to divide: 1 x 3 is 3, not 2"),
        ("join", "join_uneven_inputs: sharded ranks wait for each other"),
        ("shared", "Sequential shares a parameter with Stack"),
        (
            "class",
            r"fsdp\.wrap=Blok: no model has a module with parameters of .*; there are Block, Embedding",
        ),
        ("twice", "is prepared already"),
        ("twice after close", "Stack is prepared already"),
    ],
)
def test_what_sharding_cannot_do_is_refused(kind: str, said: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=said):
        be_refused(kind)


def test_a_context_without_a_group_is_refused() -> None:
    context = connect(StateSettings(device="cpu", watchdog=False))
    with pytest.raises(RuntimeError, match="the fsdp backend needs a process group"):
        FSDPBackend(context, choose_policy("no", context.device), window=AccumulationWindow())


@pytest.mark.ranks(4)
@pytest.mark.slow
def test_the_runs_own_mesh_is_what_models_are_sharded_over() -> None:
    context = connect(StateSettings(device="cpu", watchdog=False), parallelism=ParallelDims(data=2, shard=2))
    make = partial(FSDPBackend, context, choose_policy("no", context.device), window=AccumulationWindow())
    with pytest.raises(ValueError, match="parallelism says data=2 and shard=2"):
        make(settings=FSDPSettings(strategy="no_shard"))
    backend, model = make(settings=FSDPSettings()), stack()
    backend.prepare([model], [], [])
    found = backend.applied()
    assert (found["strategy"].value, found["shard_size"].value) == ("hybrid_shard", 2)
    assert model.head.weight.device_mesh.get_group("shard") == context.mesh.get_group("shard")


ALIKE = replace(CASE, loss=lambda model, rank, number: model(tokens(0)).float().square().mean())


def tied_stack(over_blocks: bool) -> Stack:
    model = stack(tied=True)
    if over_blocks:
        model.blocks[1].linear.weight = model.blocks[0].linear.weight
    return model


@pytest.mark.ranks(2)
@pytest.mark.parametrize("over_blocks", [False, True])
def test_weights_tied_over_blocks_stay_tied_and_train_as_one(over_blocks: bool) -> None:
    case = replace(ALIKE, build=partial(tied_stack, over_blocks))
    backend, model, prepared = prepare_sgd(fsdp(wrap=("Block", "Embedding", "Linear")), case.build())
    assert_equal(train(case, backend, [prepared]), run_plain(case, 2))
    assert model.head.weight is model.embedding.weight
    assert (model.blocks[1].linear.weight is model.blocks[0].linear.weight) is over_blocks
    left_out = backend.applied()["wrap"].reason
    assert ("blocks.0 is left out" in left_out) is over_blocks
    assert "embedding is left out" in left_out


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("reduce_dtype", "mean"), [("fp32", 0.5 + 2.0**-10), ("bf16", 0.5)])
def test_gradients_are_averaged_in_the_dtype_that_is_said(reduce_dtype: str, mean: float) -> None:
    """The mean of gradients 1 and 2**-9, of two ranks that compute in bf16."""
    backend = fsdp("bf16", precision=PrecisionSettings(reduce_dtype=reduce_dtype))
    _, _, prepared = prepare_sgd(backend, nn.Linear(1, 1, bias=False), lr=1.0)
    before = weights(prepared)["weight"].item()
    take_step(prepared, prepared.model(torch.full((1, 1), [1.0, 2.0**-9][dist.get_rank()])).sum())
    assert before - weights(prepared)["weight"].item() == pytest.approx(mean, abs=2.0**-13)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.slow
def test_a_block_compiles_as_one_graph_and_trains_as_before(checkpointing: Any) -> None:
    num_calls: list[int] = []  # of each compiled graph

    def counting(graph: torch.fx.GraphModule, _: object) -> object:
        num_calls.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward

    torch.compiler.reset()
    register_backend(counting, name=(name := f"counting_{checkpointing}"))
    plain, regions = (
        run_on_ranks(
            ALIKE,
            fsdp(
                "bf16",
                changes=ModelSettings(
                    activation_checkpointing=checkpointing, compile=compiled, compile_backend=name
                ),
            ),
        )
        for compiled in ("none", "blocks")
    )
    assert regions.losses == pytest.approx(plain.losses)
    assert 1 <= len(num_calls) <= 4  # once or twice for each of two blocks, not at every step
    assert set(num_calls) == {max(num_calls)}  # nothing is broken in two


def ahead(direction: str, *blocks: int) -> set[str]:
    return {f"FSDP::{direction}_prefetch for blocks.{block}" for block in blocks}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (None, ahead("backward", 3, 2, 1, 0)),
        (1, ahead("forward", 0, 1, 2, 3) | ahead("backward", 3, 2, 1, 0)),
        (0, set()),
    ],
)
@pytest.mark.default_cases("0-expected2")
def test_blocks_are_gathered_as_far_ahead_as_is_said(depth: int | None, expected: set[str]) -> None:
    case = replace(CASE, build=partial(stack, depth=4))
    backend, _, prepared = prepare_sgd(fsdp(prefetch=depth), case.build())
    assert_equal(train(case, backend, [prepared]), run_plain(case, 2))
    with torch.profiler.profile() as profile:
        take_step(prepared, case.loss(prepared.model, dist.get_rank(), 0))
    gathering = [event for event in profile.events() if "_prefetch for" in event.name and event.cpu_children]
    assert {event.name for event in gathering} == expected
    told = backend.applied()["prefetch"]
    assert getattr(told, "value", told) == (depth or 0)


@pytest.mark.ranks(2)
def test_a_model_without_parameters_is_left_as_it_is() -> None:
    backend = fsdp()
    (prepared,) = backend.prepare([nn.Flatten()], [], [])
    assert prepared.model(torch.ones(2, 2, 2)).shape == (2, 4)
    assert "strategy" not in backend.applied()
