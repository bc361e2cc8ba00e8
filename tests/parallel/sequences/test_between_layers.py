"""Blocks of divided layers compute on parts of sequences what whole ones do, or are refused."""

from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drivetrain_parallel import (
    GroupRanks,
    divide_between_layers,
    divide_model,
    named_cuts,
    part_of,
    plan_model,
)
from drivetrain_parallel.errors import ParallelPlanError
from drivetrain_parallel.sequences.between_layers import BetweenPlan, plan_between_layers
from parallel.divided import ThreadRanks, assert_near, gradients, on_threads, trained, with_random_values
from parallel.models import ROUTES, WIDTH, Attention, Perceptron
from parallel.transformers_cases import CASES, inputs_of


class Block(nn.Module):
    """A block with norms and a scale of its own around attention and a perceptron."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention, self.perceptron = Attention(), Perceptron()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, positions, WIDTH) to the same."""
        x = x + self.drop(self.attention(self.norms[0](x)))
        return x + self.scale * self.perceptron(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, *, num_blocks: int = 2, recomputes: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9)
        self.recomputes = recomputes

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(self.norm(x))


def tokens_of(length: int) -> Tensor:
    return torch.randint(9, (2, length), generator=torch.Generator().manual_seed(length))


def assert_same(
    model: nn.Module,
    size: int,
    inputs: Sequence[Tensor],
    *,
    call: Any = lambda model, inputs: model(*inputs),
    tolerance: float = 1e-9,
) -> BetweenPlan:
    """Assert that outputs and gradients are those of the whole model."""
    whole = deepcopy(model)
    output, _ = trained(whole, inputs, call)
    expected = gradients(whole)
    plan = plan_model(model, size)
    between = plan_between_layers(model, plan)
    largest = max(one.abs().max().item() for one in expected.values() if one is not None)

    def work(ranks: ThreadRanks) -> None:
        own = deepcopy(model)
        divide_model(own, plan, ranks)
        divide_between_layers(own, between, ranks)
        found, _ = trained(own, inputs, call)
        assert_near("the output", found, output, tolerance)
        cuts = {name: cut for name, _, cut in named_cuts(own, plan)}
        for name, gradient in gradients(own).items():
            wanted = expected[name]
            if name in cuts and wanted is not None:
                wanted = part_of(wanted, cuts[name], ranks.rank, size)
            assert_near(f"the gradient of {name}", gradient, wanted, tolerance, 1e-3 * largest)

    on_threads(size, work)
    return between


@pytest.mark.parametrize(("size", "length"), [(2, 8), (2, 5), (3, 7)])
def test_blocks_compute_alike(size: int, length: int) -> None:
    plan = assert_same(with_random_values(Model()), size, [tokens_of(length)])
    names = ("attention", "perceptron")
    assert plan.joins == plan.takes == tuple(f"blocks.{index}.{name}" for index in range(2) for name in names)
    assert plan.summed[:3] == ("blocks.0", "blocks.0.norms.0", "blocks.0.norms.1")


class Routed(Model):
    """A model of three blocks, which `route` goes through in another way."""

    def __init__(self, route: str) -> None:
        super().__init__(num_blocks=3)
        self.route = ROUTES[route]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.route(self.words(tokens), *self.blocks)))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.default_cases("adds what went into a block", "leaves early", "runs one twice", "goes around")
def test_a_model_may_go_through_its_blocks_in_any_way(route: str) -> None:
    assert_same(with_random_values(Routed(route)), 2, [tokens_of(7)])


def test_what_stands_between_layers_holds_parts() -> None:
    shapes: set[tuple[int, ...]] = set()
    whole = Model()

    def work(ranks: ThreadRanks) -> None:
        model = deepcopy(whole)
        plan = plan_model(model, 2)
        between = plan_between_layers(model, plan)
        divide_model(model, plan, ranks)
        divide_between_layers(model, between, ranks)
        model(tokens_of(8))  # compared here
        model.blocks[1].norms[1].register_forward_hook(lambda _, __, output: shapes.add(tuple(output.shape)))  # type: ignore[union-attr, index]
        model(tokens_of(8))

    on_threads(2, work)
    assert shapes == {(2, 4, WIDTH)}


@pytest.mark.ranks(2)
def test_dropout_of_blocks_that_are_run_again_is_that_of_their_forward() -> None:
    found: list[dict[str, Tensor | None]] = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        model = with_random_values(Model(num_blocks=3, recomputes=recomputes, dropout=0.5))
        plan = plan_model(model, 2)
        between = plan_between_layers(model, plan)
        divide_model(model, plan, GroupRanks(dist.group.WORLD))
        divide_between_layers(model, between, GroupRanks(dist.group.WORLD))
        torch.manual_seed(1)
        for _ in range(2):
            trained(model, [tokens_of(8)])
        found.append(gradients(model))
    for name, gradient in found[0].items():
        assert_near(name, found[1][name], gradient, 1e-9)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recomputes", [False, True])
def test_weights_that_all_ranks_hold_have_one_gradient_under_dropout(recomputes: bool) -> None:
    torch.manual_seed(0)
    model = with_random_values(Model(recomputes=recomputes, dropout=0.5))
    plan = plan_model(model, 2)
    between = plan_between_layers(model, plan)
    divide_model(model, plan, GroupRanks(dist.group.WORLD))
    divide_between_layers(model, between, GroupRanks(dist.group.WORLD))
    trained(model, [tokens_of(8)])
    cuts = {name for name, _, _ in named_cuts(model, plan)}
    for name, gradient in gradients(model).items():
        if name in cuts or gradient is None:
            continue
        found = [torch.empty_like(gradient) for _ in range(2)]
        dist.all_gather(found, gradient.contiguous())
        assert_near(name, found[1], found[0], 1e-12)


REFUSED = {
    "opt": r"a block of its class, is given a tensor of shape \(8, 32\) first",  # it flattens positions
    "phi3": r"model\.layers\.0 does not run on divided sequences",  # its attention stays whole
    "deepseek v3": r"model\.layers\.0 does not run on divided sequences",
}


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "vit", "mixtral", "bert", *REFUSED])
@pytest.mark.default_cases("qwen3", "gpt2")
def test_models_of_a_library_compute_alike_or_are_refused(name: str) -> None:
    pytest.importorskip("transformers")
    case = CASES[name]
    model = with_random_values(case.build()) if case.in_fp64 else case.build()

    def call(model: nn.Module, inputs: Sequence[Tensor]) -> Any:
        return model(**dict(zip(case.inputs, inputs, strict=True)))

    reason = REFUSED.get(name)
    with nullcontext() if reason is None else pytest.raises(ParallelPlanError, match=reason):
        # Norms of transformers compute in fp32.
        assert_same(model, 2, inputs_of(case), call=call, tolerance=1e-6 if case.in_fp64 else 1e-3)


@pytest.mark.parametrize("kind", [Perceptron, Attention])
def test_layers_of_a_block_itself_join_and_take(kind: Any) -> None:
    model = nn.Sequential(nn.Embedding(9, WIDTH), nn.Sequential(kind(), kind()))
    plan = assert_same(with_random_values(model), 2, [tokens_of(7)])
    assert len(plan.joins) == (2 if kind is Perceptron else 6)
    assert len(plan.takes) == 2
