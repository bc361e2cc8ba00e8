import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import register_backend
from torch.optim import SGD

from drivetrain_backends import AccumulationWindow, AutoValue, FSDPBackend, FSDPSettings, Prepared
from drivetrain_backends.state_dict.full_tensors import full_tensor
from drivetrain_precision import PrecisionSettings, choose_policy
from drivetrain_state import ParallelDims, StateSettings, connect
from plain_loop.backends import fsdp, plain_step, prepare_sgd, step_and_clear
from plain_loop.stack import Stack, stack, tokens


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
    "activation_checkpointing": "selective",
    "compile_regions": True,
}


@pytest.mark.slow
def test_what_is_asked_for_is_read_back_from_the_modules(run_ranks) -> None:
    for found in run_ranks(applied, "bf16", ASKED):
        assert {name: found[name] for name in ASKED} == ASKED


def applied_to_little(upcast: bool) -> dict[str, object]:
    backend = fsdp(wrap=("Block", "Embedding"), prefetch=5, upcast=upcast)
    backend.prepare([stack(tied=True).requires_grad_(upcast), nn.Linear(2, 2).requires_grad_(False)], [], [])
    found = dict(backend.applied())
    backend.close()
    return found


@pytest.mark.parametrize("upcast", [False, True])
def test_what_falls_short_of_what_was_asked_says_why(run_ranks, upcast: bool) -> None:
    (found,) = run_ranks(applied_to_little, upcast, num_processes=1)
    assert found["wrap"] == AutoValue(
        value=("Block",), reason="embedding is left out, as it shares head.weight"
    )
    assert found["prefetch"] == AutoValue(value=2, reason="there are no more blocks")
    assert found["upcast"] is upcast  # though there was nothing to cast


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "hybrid_shard", "no_shard"])
def test_the_strategy_in_force_is_read_back(run_ranks, strategy: str) -> None:
    for found in run_ranks(applied, "no", {"strategy": strategy}):
        assert found["strategy"] == strategy


def test_what_was_left_open_comes_with_its_reason(run_ranks) -> None:
    (found, _) = run_ranks(applied, "fp16", {})
    assert found["strategy"] == AutoValue(value="full_shard", reason="what saves the most memory")
    assert found["shard_size"].value == 2
    assert found["wrap"] == AutoValue(value=("Block",), reason="the modules of its lists")
    assert found["reduce_dtype"].value == "fp32"
    assert found["upcast"].value is False  # it is fp32 already
    assert (found["offload"], found["activation_checkpointing"]) == (False, "none")


def refusal(kind: str) -> str:
    try:
        if kind == "size":
            fsdp(strategy="hybrid_shard", shard_size=3)
        backend = fsdp()
        model = stack()
        if kind == "join":
            backend.join([])
        elif kind == "shared":
            other = nn.Sequential(model.head)
            backend.prepare([model, other], [], [])
        elif kind == "class":
            fsdp(wrap=("Blok",)).prepare([model], [], [])
        else:
            backend.prepare([model], [], [])
            if kind == "twice after close":
                backend.close()
                backend = fsdp()
            backend.prepare([model], [], [])
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "prepared"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("size", "fsdp.shard_size=3 with world_size=2: 1 x 3 is 3, not 2"),
        ("join", "join_uneven_inputs: sharded ranks wait for each other"),
        ("shared", "Sequential shares a parameter with Stack"),
        (
            "class",
            "fsdp.wrap=Blok: no model has a module of that class with parameters; there are Block, Embedding",
        ),
        ("twice", "is prepared already"),
        ("twice after close", "Stack is prepared already"),
    ],
)
def test_what_sharding_cannot_do_is_refused(run_ranks, kind: str, said: str) -> None:
    for message in run_ranks(refusal, kind):
        assert said in message


def test_a_context_without_a_group_is_refused() -> None:
    context = connect(StateSettings(device="cpu", watchdog=False))
    with pytest.raises(RuntimeError, match="the fsdp backend needs a process group"):
        FSDPBackend(context, choose_policy("no", context.device), window=AccumulationWindow())


def strategy_of_mesh(strategy: str | None) -> tuple[str, int] | str:
    context = connect(StateSettings(device="cpu", watchdog=False), parallelism=ParallelDims(data=2, shard=2))
    try:
        backend = FSDPBackend(
            context,
            choose_policy("no", context.device),
            window=AccumulationWindow(),
            settings=FSDPSettings(strategy=strategy),
        )
    except ValueError as error:
        return str(error)
    model = stack()
    backend.prepare([model], [], [])
    found = backend.applied()
    mesh = model.head.weight.device_mesh
    assert mesh.get_group("shard") == context.mesh.get_group("shard")
    backend.close()
    return found["strategy"].value, found["shard_size"].value


def test_the_runs_own_mesh_is_what_models_are_sharded_over(run_ranks) -> None:
    assert run_ranks(strategy_of_mesh, None, num_processes=4) == [("hybrid_shard", 2)] * 4
    for said in run_ranks(strategy_of_mesh, "no_shard", num_processes=4):
        assert "parallelism says data=2 and shard=2" in said


def three_steps(backend: FSDPBackend, prepared: Prepared) -> list[float]:
    """The losses of three steps on the same tokens."""
    losses: list[float] = []
    for _ in range(3):
        backend.window.begin()
        loss = prepared.model(tokens(0)).float().square().mean()
        prepared.backward(loss)
        step_and_clear(prepared)
        losses.append(loss.item())
    return losses


def three_plain_steps(model: nn.Module) -> list[float]:
    """The losses of the same steps in a plain loop."""
    optimizer = SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    for _ in range(3):
        loss = model(tokens(0)).square().mean()
        plain_step(optimizer, loss)
        losses.append(loss.item())
    return losses


def tied_over_blocks(tied: bool) -> tuple[bool, dict[str, str], list[float]]:
    backend = fsdp(wrap=("Block", "Embedding", "Linear"))
    model = stack(tied=True)
    if tied:
        model.blocks[1].linear.weight = model.blocks[0].linear.weight
    (prepared,) = backend.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
    losses = three_steps(backend, prepared)
    same = model.head.weight is model.embedding.weight
    if tied:
        same &= model.blocks[1].linear.weight is model.blocks[0].linear.weight
    left_out = prepared.sharded.plan.left_out
    backend.close()
    return same, left_out, losses


@pytest.mark.parametrize("tied", [False, True])
def test_weights_tied_over_blocks_stay_tied_and_train_as_one(run_ranks, tied: bool) -> None:
    model = stack(tied=True)
    if tied:
        model.blocks[1].linear.weight = model.blocks[0].linear.weight
    expected = three_plain_steps(model)
    for same, left_out, losses in run_ranks(tied_over_blocks, tied):
        assert same
        assert ("blocks.0" in left_out) is tied
        assert "embedding" in left_out
        assert losses == pytest.approx(expected)


class KnownBlocks(Stack):
    """A stack that says itself what its blocks are, as Hugging Face's models do."""

    _no_split_modules = ("Block",)


def trained_in_blocks(options: dict[str, object]) -> tuple[list[str], object, list[float]]:
    backend = fsdp(**options)
    torch.manual_seed(0)
    model = KnownBlocks()
    (prepared,) = backend.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
    losses = three_steps(backend, prepared)
    blocks, told = list(prepared.sharded.plan.blocks), backend.applied()["wrap"]
    backend.close()
    return blocks, told, losses


@pytest.mark.parametrize(
    ("options", "blocks", "reason"),
    [
        ({}, ["blocks.0", "blocks.1"], "the model's _no_split_modules"),
        ({"min_num_params": 35}, ["blocks.0.linear", "blocks.1.linear"], "min_num_params"),
        ({"wrap": ("Block", "Embedding")}, ["embedding", "blocks.0", "blocks.1"], None),
    ],
    ids=str,
)
def test_a_model_trains_alike_in_blocks_found_in_any_way(
    run_ranks, options: dict[str, object], blocks: list[str], reason: str | None
) -> None:
    torch.manual_seed(0)
    model = KnownBlocks()
    expected = three_plain_steps(model)
    for found, told, losses in run_ranks(trained_in_blocks, options):
        assert sorted(found) == sorted(blocks)
        assert losses == pytest.approx(expected)
        if reason is not None:
            assert isinstance(told, AutoValue)
            assert told.reason == reason


def reduced(reduce_dtype: str) -> float:
    """The mean of gradients 1 and 2**-9, of two ranks that compute in bf16."""
    backend, _model, prepared = prepare_sgd(
        fsdp("bf16", precision=PrecisionSettings(reduce_dtype=reduce_dtype)),
        nn.Linear(1, 1, bias=False),
        lr=1.0,
    )
    before = full_tensor(prepared.state_dict()["model"]["weight"]).item()
    backend.window.begin()
    prepared.backward(prepared.model(torch.full((1, 1), [1.0, 2.0**-9][dist.get_rank()])).sum())
    prepared.optimizers[0].step()
    after = full_tensor(prepared.state_dict()["model"]["weight"]).item()
    backend.close()
    return before - after


@pytest.mark.parametrize(("reduce_dtype", "mean"), [("fp32", 0.5 + 2.0**-10), ("bf16", 0.5)])
def test_gradients_are_averaged_in_the_dtype_that_is_said(run_ranks, reduce_dtype: str, mean: float) -> None:
    assert run_ranks(reduced, reduce_dtype) == pytest.approx([mean] * 2, abs=2.0**-13)


def compiled(checkpointing: str) -> tuple[list[float], list[float], list[int]]:
    """Losses as it is and compiled by block, and how many calls each compiled graph holds."""
    graphs: list[int] = []

    def counting(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward

    torch.compiler.reset()
    register_backend(counting, name=f"counting_{checkpointing}")
    losses: list[list[float]] = []
    for compile_regions in (False, True):
        backend, _model, prepared = prepare_sgd(
            fsdp(
                "bf16",
                compile_regions=compile_regions,
                activation_checkpointing=checkpointing,
                compile_backend=f"counting_{checkpointing}",
            ),
            stack(),
        )
        losses.append(three_steps(backend, prepared))
        backend.close()
    return losses[0], losses[1], graphs


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.default_cases("selective")
def test_a_block_compiles_as_one_graph_and_trains_as_before(run_ranks, checkpointing: str) -> None:
    for plain, regions, graphs in run_ranks(compiled, checkpointing):
        assert regions == pytest.approx(plain)
        assert 1 <= len(graphs) <= 4  # once or twice for each of two blocks, not at every step
        assert set(graphs) == {max(graphs)}  # nothing is broken in two


def prefetched(depth: int | None) -> tuple[list[float], set[str], int]:
    """Losses, what was gathered ahead of its turn in the last step, and the depth that is told."""
    backend, _model, prepared = prepare_sgd(fsdp(prefetch=depth), stack(depth=4))
    losses: list[float] = []
    for step in range(3):
        backend.window.begin()
        with torch.profiler.profile() as profile:
            loss = prepared.model(tokens(step + dist.get_rank())).square().mean()
            prepared.backward(loss)
        step_and_clear(prepared)
        losses.append(loss.item())
    told = backend.applied()["prefetch"]
    backend.close()
    gathering = [event for event in profile.events() if "_prefetch for" in event.name and event.cpu_children]
    names = {event.name.removeprefix("FSDP::") for event in gathering}
    return losses, names, told if isinstance(told, int) else told.value


def ahead(direction: str, *blocks: int) -> set[str]:
    return {f"{direction}_prefetch for blocks.{block}" for block in blocks}


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (None, ahead("backward", 3, 2, 1, 0)),
        (1, ahead("forward", 0, 1, 2, 3) | ahead("backward", 3, 2, 1, 0)),
        (0, set()),
    ],
)
@pytest.mark.default_cases("0-expected2")
def test_blocks_are_gathered_as_far_ahead_as_is_said(
    run_ranks, depth: int | None, expected: set[str]
) -> None:
    plain = run_ranks(prefetched, None)
    for (losses, names, told), (same, _, _) in zip(run_ranks(prefetched, depth), plain, strict=True):
        assert losses == same
        assert names == expected
        assert told == (depth or 0)


def model_without_parameters() -> tuple[bool, bool]:
    backend = fsdp()
    (prepared,) = backend.prepare([nn.Flatten()], [], [])
    found = prepared.model(torch.ones(2, 2, 2)).shape == (2, 4), "strategy" in backend.applied()
    backend.close()
    return found


def test_a_model_without_parameters_is_left_as_it_is(run_ranks) -> None:
    assert run_ranks(model_without_parameters) == [(True, False)] * 2
