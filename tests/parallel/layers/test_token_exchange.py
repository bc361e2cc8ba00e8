"""Experts on several ranks compute what they compute together, whatever tokens choose."""

from copy import deepcopy
from threading import Barrier

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drivetrain_parallel import (
    ParallelPlanError,
    divide_model,
    expert_counts,
    named_cuts,
    part_of,
    plan_experts,
)
from parallel.divided import ThreadRanks, assert_near, on_threads
from parallel.models import Experts

WIDTH = 4
Choices = list[list[list[int]]]  # of each token of each rank


@st.composite
def choices(draw: st.DrawFn) -> tuple[int, Choices]:
    """Draw the number of experts, and what each token of each rank chooses: the same one twice, too, or all one."""
    num_ranks, k = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    num_experts = draw(st.integers(max(2, num_ranks), 7))
    chosen = st.integers(0, draw(st.sampled_from([0, num_experts - 1])))
    token = st.lists(chosen, min_size=k, max_size=k)
    tokens = st.lists(token, max_size=4)
    return num_experts, draw(st.lists(tokens, min_size=num_ranks, max_size=num_ranks))


def given_to(rank: int, chosen: list[list[int]], k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randn(len(chosen), WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    weights = torch.rand(len(chosen), k, generator=generator, dtype=torch.float64).to(dtype)
    index = torch.tensor(chosen, dtype=torch.long).view(-1, k)
    return tokens.requires_grad_(), index, weights.requires_grad_()


def check(num_experts: int, by_rank: Choices, dtype: torch.dtype, tolerance: float) -> None:
    k = next((len(token) for chosen in by_rank for token in chosen), 1)
    torch.manual_seed(0)
    whole = Experts(num_experts, WIDTH).to(dtype)
    size = len(by_rank)

    def train(module: torch.nn.Module, rank: int) -> list[Tensor | None]:
        tokens, index, weights = given_to(rank, by_rank[rank], k, dtype)
        output = module(tokens, index, weights)
        assert output.dtype == dtype
        (output * torch.linspace(-1, 1, WIDTH, dtype=dtype)).sum().backward()
        return [output.detach(), tokens.grad, weights.grad]

    expected = [
        train(whole, rank) for rank in range(size)
    ]  # which adds up the gradients of all ranks' losses

    def work(ranks: ThreadRanks) -> None:
        own = deepcopy(whole)
        plan = plan_experts(own, size)
        own.zero_grad()
        divide_model(own, plan, ranks)
        for one, other in zip(train(own, ranks.rank), expected[ranks.rank], strict=True):
            assert_near("a tensor of this rank", one, other, tolerance)
        for name, parameter, cut in named_cuts(own, plan):
            mean = whole.get_parameter(name).grad
            mean = None if mean is None else part_of(mean / size, cut, ranks.rank, size)
            assert parameter.grad is not None
            assert_near(f"the gradient of {name}", parameter.grad, mean, tolerance, tolerance)
        counts = torch.tensor([expert for token in by_rank[ranks.rank] for expert in token], dtype=torch.long)
        assert torch.equal(expert_counts(own)[""], counts.bincount(minlength=num_experts))

    on_threads(size, work)


@settings(max_examples=25)
@given(choices())
def test_outputs_and_gradients_are_those_of_all_experts_together(drawn: tuple[int, Choices]) -> None:
    check(*drawn, torch.float64, 1e-12)


@pytest.mark.parametrize(
    "by_rank",
    [
        [[[4, 4], [4, 4]], [[4, 4]]],
        [[], [[0, 1]]],
        [[], []],
        [[[0, 1]], [[1, 0]]],
    ],
    ids=["all to the last", "a rank without tokens", "none at all", "a rank whose experts no token chooses"],
)
def test_ranks_wait_for_no_token(by_rank: Choices) -> None:
    check(5, by_rank, torch.float64, 1e-12)


def test_half_precision_is_kept() -> None:
    check(5, [[[0, 4], [3, 1]], [[4, 2], [4, 0], [1, 1]]], torch.bfloat16, 2e-2)


def test_arguments_may_be_named() -> None:
    whole = Experts(2, WIDTH).double()

    def work(ranks: ThreadRanks) -> None:
        own = deepcopy(whole)
        divide_model(own, plan_experts(own, 2), ranks)
        tokens, index, weights = given_to(0, [[1], [0]], 1, torch.float64)
        expected = whole(tokens, index, weights)
        torch.testing.assert_close(own(tokens, weights=weights, index=index), expected)

    on_threads(2, work)


def test_an_index_of_no_expert_is_refused() -> None:
    def work(ranks: ThreadRanks) -> None:
        own = Experts(2, WIDTH).double()
        divide_model(own, plan_experts(own, 2), ranks)
        with pytest.raises(RuntimeError, match="out of bounds"):
            own(*given_to(0, [[2]], 1, torch.float64))

    on_threads(2, work)


@pytest.mark.parametrize("num_tokens", [5, 1, 0])
def test_ranks_that_are_given_the_same_tokens_compute_each_once(num_tokens: int) -> None:
    chosen = [[number % 5, (number + 2) % 5] for number in range(num_tokens)]
    whole = Experts(5, WIDTH).double()

    def train(module: torch.nn.Module) -> list[Tensor | None]:
        tokens, index, weights = given_to(0, chosen, 2, torch.float64)
        output = module(tokens, index, weights)
        output.square().sum().backward()
        return [output.detach(), tokens.grad, weights.grad]

    expected = train(whole)

    def work(ranks: ThreadRanks) -> tuple[list[Tensor | None], int]:
        own = deepcopy(whole)
        own.zero_grad()
        plan = plan_experts(own, ranks.size)
        divide_model(own, plan, ranks, alike=ranks)
        found = train(own)
        for name, parameter, cut in named_cuts(own, plan):
            gradient = whole.get_parameter(name).grad
            assert gradient is not None
            assert_near(name, parameter.grad, part_of(gradient, cut, ranks.rank, ranks.size), 1e-12, 1e-12)
        return found, int(expert_counts(own)[""].sum())

    results = on_threads(2, work)
    for found, _ in results:
        for one, other, first in zip(found, expected, results[0][0], strict=True):
            assert_near("a tensor", one, other, 1e-12)
            assert one is not None
            assert first is not None
            assert torch.equal(one, first)
    assert sum(number for _, number in results) == 2 * num_tokens


def test_ranks_that_would_compute_the_same_tokens_twice_are_refused() -> None:
    def work(ranks: ThreadRanks) -> None:
        model = Experts(3, WIDTH)
        alike = ThreadRanks(0, Barrier(1), [torch.empty(0)] * 2)
        with pytest.raises(
            ParallelPlanError, match="3 ranks with experts, of which 2 are given the same input"
        ):
            divide_model(model, plan_experts(model, 3), ranks, alike=alike)
        assert model.num_experts == 3

    on_threads(3, work)
