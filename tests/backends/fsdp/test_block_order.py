"""Ranks that run other blocks, or in another order: an error on every rank before a wrong step."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from backends.replicas import step_and_clear
from drivetrain_backends import AccumulationWindow, FSDPBackend, FSDPSettings
from drivetrain_precision import choose_policy
from drivetrain_state import CollectiveMismatchError, StateSettings, connect
from sharded_stack import fsdp, stack, tokens, weights


class Expert(nn.Module):
    """A layer; maps (items, width) to (items, out)."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Mixture(nn.Module):
    """Experts of which a call names those it takes; maps (items, 8) to (items, 1)."""

    def __init__(self, hidden: tuple[int, ...] = (8, 8)) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            Expert(8, 8) if size == 8 else nn.Sequential(Expert(8, size), Expert(size, 8)) for size in hidden
        )
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for index in order:
            x = self.experts[index](x)
        return self.out(x)


def mismatch(
    orders: list[tuple[tuple[int, ...], ...]],
    hidden: tuple[int, ...] = (8, 8),
    debug: bool = False,
    settings: FSDPSettings | None = None,
) -> tuple[str, int, bool]:
    """What is said of steps in which each rank takes its own experts; at which step, and whether weights moved."""
    context = connect(StateSettings(device="cpu", watchdog=False, debug=debug), needs_group=True)
    policy = choose_policy("no", context.device)
    backend = FSDPBackend(context, policy, window=AccumulationWindow(), settings=settings or FSDPSettings())
    torch.manual_seed(0)
    model = Mixture(hidden)
    (prepared,) = backend.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
    said, failed_at = "nothing", -1
    before: list[Tensor] = []
    for step, by_rank in enumerate(orders):
        backend.window.begin()
        before = [p.to_local().clone() for p in prepared.sharded.parameters.values()]
        try:
            prepared.backward(prepared.model(torch.ones(2, 8), by_rank[dist.get_rank()]).square().mean())
            step_and_clear(prepared)
        except CollectiveMismatchError as error:
            said, failed_at = str(error), step
            break
    after = [p.to_local() for p in prepared.sharded.parameters.values()]
    moved = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    backend.close()
    return said, failed_at, moved


ALIKE = ((0, 1), (0, 1))


def several(debug: bool) -> list[tuple[str, int, bool]]:
    return [
        mismatch([((0,), (1,))], debug=debug),
        mismatch([ALIKE, ((0, 1), (1, 0))], debug=debug),
        mismatch([ALIKE] * 2 + [((0,), (1,))], debug=debug),
        mismatch([((0, 1), (0, 2))], hidden=(8, 8, 6), debug=debug),
        mismatch([((0, 1), (0,))], debug=debug),
    ]


@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
def test_ranks_that_take_other_blocks_are_named_before_a_wrong_step(run_ranks, debug: bool) -> None:
    for first, swapped, later, other_size, fewer in run_ranks(several, debug):
        assert "rank 0: gather experts.0 of Mixture; rank 1: gather experts.1 of Mixture" in first[0]
        assert "rank 0: gather experts.0 of Mixture; rank 1: gather experts.1 of Mixture" in swapped[0]
        assert "rank 0: gather experts.0 of Mixture; rank 1: gather experts.1 of Mixture" in later[0]
        assert "rank 0: gather experts.1 of Mixture; rank 1: gather experts.2 of Mixture" in other_size[0]
        assert "rank 0: gather experts.1 of Mixture; rank 1: " in fewer[0]
        assert [step for _, step, _ in (first, swapped, later)] == [0, 1, 2]
        assert not any(moved for _, _, moved in (first, swapped, later, other_size, fewer))


def evaluated(differs: bool) -> str:
    """What is said of an evaluation long after the first uses of every block."""
    backend = fsdp()
    torch.manual_seed(0)
    (prepared,) = backend.prepare([model := Mixture()], [SGD(model.parameters(), lr=0.1)], [])
    for _ in range(6):
        prepared.backward(prepared.model(torch.ones(2, 8), (0, 1)).square().mean())
        step_and_clear(prepared)
    try:
        with torch.no_grad():
            prepared.model(torch.ones(2, 8), (dist.get_rank() if differs else 0,))
        return "nothing"
    except CollectiveMismatchError as error:
        return str(error)
    finally:
        backend.close()


def test_an_evaluation_with_other_blocks_gives_an_error_and_no_output(run_ranks) -> None:
    assert run_ranks(evaluated, False) == ["nothing"] * 2
    for said in run_ranks(evaluated, True):
        assert "rank 0: gather experts.0 of Mixture; rank 1: gather experts.1 of Mixture" in said


def in_hybrid_shards() -> list[tuple[str, int, bool]]:
    halves = FSDPSettings(strategy="hybrid_shard", shard_size=2)
    return [
        mismatch([((0, 1),) * 4], settings=halves),
        mismatch([((0, 1),) * 4, ((0, 1), (1, 0), (0, 1), (0, 1))], settings=halves),  # within a copy
        mismatch([((0, 1),) * 4, ((0,), (0,), (1,), (1,))], settings=halves),  # from one copy to the other
    ]


@pytest.mark.slow
def test_ranks_of_hybrid_shards_are_compared_within_a_copy_and_across(run_ranks) -> None:
    for alike, within, across in run_ranks(in_hybrid_shards, num_processes=4):
        assert alike[0] == "nothing"
        assert "gather experts.0 of Mixture" in within[0]
        assert "of Mixture" in across[0]
        assert (within[1:], across[1:]) == ((1, False), (1, False))


WAYS: list[dict[str, object]] = [
    {"activation_checkpointing": "full"},
    {"prefetch": 2},
    {"strategy": "shard_grad_op"},
    {"strategy": "no_shard"},
]


def trained_in_many_ways() -> list[bool]:
    """Whether two models, one of them frozen, train and evaluate in windows of two micro-batches."""
    moved: list[bool] = []
    for way in WAYS:
        backend = fsdp(accumulation=2, **way)
        model, teacher = stack(0), stack(1)
        model.blocks[0].requires_grad_(False)
        teacher.requires_grad_(False)
        first, second = (
            *backend.prepare([model], [SGD(model.parameters(), lr=0.1)], []),
            *backend.prepare([teacher], [], []),
        )
        before = weights(first)
        for _ in range(3):
            for closes in (False, True):
                backend.window.begin()
                loss = (first.model(tokens(dist.get_rank())) - second.model(tokens(0))).square().mean()
                if closes:
                    first.backward(loss)
                else:
                    with first.no_sync():
                        first.backward(loss)
            first.clip(norm=1.0)
            step_and_clear(first)
            with torch.no_grad():
                first.model(tokens(0))
        moved.append(not torch.equal(before["head.weight"], weights(first)["head.weight"]))
        backend.close()
    return moved


@pytest.mark.slow
def test_ranks_that_run_the_same_blocks_are_left_alone(run_ranks) -> None:
    for moved in run_ranks(trained_in_many_ways):
        assert moved == [True] * len(WAYS)
