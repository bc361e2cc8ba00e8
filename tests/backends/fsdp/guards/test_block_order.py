"""Ranks that run other blocks, or in another order: an error on every rank before a wrong step."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain_backends import AccumulationWindow, FSDPBackend, FSDPSettings
from drivetrain_backends.settings import ModelSettings
from drivetrain_precision import choose_policy
from drivetrain_state import CollectiveMismatchError
from plain_loop.backends import context, fsdp, prepare_sgd, take_step, weights
from plain_loop.case import train
from plain_loop.stack import CASE, stack, tokens


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
        torch.manual_seed(0)
        self.experts = nn.ModuleList(
            Expert(8, 8) if size == 8 else nn.Sequential(Expert(8, size), Expert(size, 8)) for size in hidden
        )
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for index in order:
            x = self.experts[index](x)
        return self.out(x)


def mismatch(
    orders: list[tuple[tuple[int, ...], ...]], hidden: tuple[int, ...], settings: FSDPSettings, debug: bool
) -> tuple[str, int]:
    """Train steps in which each rank takes its own experts; return the error, and its step, which moves no weight."""
    where = context(debug=debug)
    backend = FSDPBackend(
        where, choose_policy("no", where.device), window=AccumulationWindow(), settings=settings
    )
    _, _, prepared = prepare_sgd(backend, Mixture(hidden))
    for step, by_rank in enumerate(orders):
        shards = list(prepared.model.parameters())
        before = [p.to_local().clone() for p in shards]
        try:
            take_step(prepared, prepared.model(torch.ones(2, 8), by_rank[dist.get_rank()]).square().mean())
        except CollectiveMismatchError as error:
            after = [p.to_local() for p in shards]
            assert all(map(torch.equal, before, after))
            backend.close()
            return str(error), step
    backend.close()
    return "nothing", -1


ALIKE = ((0, 1), (0, 1))
ZERO_AND_ONE = "rank 0: gather experts.0 of Mixture; rank 1: gather experts.1 of Mixture"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
@pytest.mark.parametrize(
    ("orders", "hidden", "said"),
    [
        ([((0,), (1,))], (8, 8), ZERO_AND_ONE),
        ([ALIKE, ((0, 1), (1, 0))], (8, 8), ZERO_AND_ONE),
        ([ALIKE] * 2 + [((0,), (1,))], (8, 8), ZERO_AND_ONE),
        ([((0, 1), (0, 2))], (8, 8, 6), ZERO_AND_ONE.replace("1 of", "2 of").replace("0 of", "1 of")),
        ([((0, 1), (0,))], (8, 8), "rank 0: gather experts.1 of Mixture; rank 1: "),
    ],
    ids=["first", "swapped", "later", "another size", "fewer"],
)
def test_ranks_that_take_other_blocks_are_named_before_a_wrong_step(orders, hidden, said, debug) -> None:
    told, step = mismatch(orders, hidden, FSDPSettings(), debug)
    assert said in told
    assert step == len(orders) - 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("differs", [False, True])
def test_an_evaluation_with_other_blocks_long_after_their_first_use_gives_an_error(differs: bool) -> None:
    _, _, prepared = prepare_sgd(fsdp(), Mixture())
    for _ in range(6):
        take_step(prepared, prepared.model(torch.ones(2, 8), (0, 1)).square().mean())
    with torch.no_grad():
        if not differs:
            prepared.model(torch.ones(2, 8), (0,))
            return
        with pytest.raises(CollectiveMismatchError, match=ZERO_AND_ONE):
            prepared.model(torch.ones(2, 8), (dist.get_rank(),))


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("orders", "said", "step"),
    [
        ([((0, 1),) * 4], "nothing", -1),
        ([((0, 1),) * 4, ((0, 1), (1, 0), (0, 1), (0, 1))], "gather experts.0 of Mixture", 1),
        ([((0, 1),) * 4, ((0,), (0,), (1,), (1,))], "of Mixture", 1),
    ],
    ids=["alike", "within a copy", "from one copy to the other"],
)
def test_ranks_of_hybrid_shards_are_compared_within_a_copy_and_across(orders, said, step) -> None:
    halves = FSDPSettings(strategy="hybrid_shard", shard_size=2)
    told, at = mismatch(orders, (8, 8), halves, False)
    assert said in told
    assert at == step


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "way",
    [
        {"changes": ModelSettings(activation_checkpointing="full")},
        {"prefetch": 2},
        {"strategy": "shard_grad_op"},
        {"strategy": "no_shard"},
    ],
    ids=str,
)
def test_ranks_that_run_the_same_blocks_are_left_alone(way: dict[str, object]) -> None:
    """Two models, one of them frozen, train and evaluate in windows of two micro-batches."""
    backend, model, teacher = fsdp(accumulation=2, **way), stack(0), stack(1).requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    (second,) = backend.prepare([teacher], [], [])
    _, _, first = prepare_sgd(backend, model)
    before = weights(first)["head.weight"]

    def loss(model: nn.Module, rank: int, number: int) -> Tensor:
        return (model(tokens(rank)) - second.model(tokens(0))).square().mean()

    def evaluate(model: nn.Module, step: int) -> None:
        with torch.no_grad():
            first.model(tokens(0))

    case = replace(CASE, loss=loss, accumulation=2, clip={"norm": 1.0}, after_step=evaluate)
    (after,) = train(case, backend, [first]).weights
    assert not torch.equal(before, after["head.weight"])
    backend.close()
