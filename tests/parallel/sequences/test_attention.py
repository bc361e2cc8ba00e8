"""Attention on parts of a sequence is that on the whole: any mask, any numbers of heads, either way."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drivetrain_parallel.errors import ParallelPlanError
from drivetrain_parallel.sequences.attention import DividedAttention
from drivetrain_parallel.sequences.positions import SequenceCut
from parallel.divided import ThreadRanks, on_threads

WIDTH = 4


def documents(length: int) -> Tensor:
    """The mask of two documents that are packed into one sequence."""
    number = torch.arange(length) >= 4
    return (number[:, None] == number) & torch.ones(length, length, dtype=torch.bool).tril()


def window(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril().triu(-2)


def padding(length: int) -> Tensor:
    return (torch.arange(length) < length - 2).expand(2, 1, 1, length)


def by_head(length: int) -> Tensor:
    return torch.randn(1, 4, length, length, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


OPTIONS: Mapping[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "none": {},
    "scaled": {"is_causal": True, "scale": 0.3},
    "documents": {"attn_mask": documents},
    "window": {"attn_mask": window},
    "padding": {"attn_mask": padding},
    "biases of heads": {"attn_mask": by_head},
}


def options_of(name: str, length: int) -> dict[str, Any]:
    return {key: value(length) if callable(value) else value for key, value in OPTIONS[name].items()}


def assert_attends_alike(
    name: str, size: int, method: str | None, length: int, heads: tuple[int, int] = (4, 4)
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, number, length, WIDTH) for number in (heads[0], heads[1], heads[1])]
    given = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    weights = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    options = options_of(name, length) | ({"enable_gqa": True} if heads[0] != heads[1] else {})
    whole = [one.clone().requires_grad_() for one in given]
    expected = F.scaled_dot_product_attention(*whole, **options)
    (expected * weights).sum().backward()
    cut = SequenceCut(length=length, size=size)

    def work(ranks: ThreadRanks) -> tuple[Tensor, list[Tensor]]:
        own = [one.index_select(-2, cut.positions(ranks.rank)).requires_grad_() for one in given]
        with DividedAttention(cut, ranks, method):
            output = F.scaled_dot_product_attention(*own, **options)
        places = torch.arange(ranks.rank * cut.own_length, (ranks.rank + 1) * cut.own_length)
        is_real = torch.isin(places, cut.order).view(-1, 1)
        (output * weights.index_select(-2, cut.positions(ranks.rank)) * is_real).sum().backward()
        return output.detach(), [one.grad for one in own if one.grad is not None]

    found = on_threads(size, work)
    output = torch.cat([one for one, _ in found], -2).index_select(-2, cut.order)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-12)
    for number, one in enumerate(whole):
        gradient = torch.cat([own[number] for _, own in found], -2).index_select(-2, cut.order)
        torch.testing.assert_close(gradient, one.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("method", ["heads", "gathered"])
def test_any_mask_is_that_of_the_whole(name: str, method: str) -> None:
    assert_attends_alike(name, 2, method, length=7)


@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (6, 2), (6, 3)])
@pytest.mark.parametrize(("size", "length"), [(2, 8), (2, 1), (3, 5), (3, 24)])
def test_any_numbers_of_heads_and_positions(heads: tuple[int, int], size: int, length: int) -> None:
    assert_attends_alike("causal", size, None, length, heads)


def test_what_cannot_be_divided_is_refused() -> None:
    def attend(num_heads: int, method: str, **lengths: int) -> None:
        def work(ranks: ThreadRanks) -> None:
            query, key = (torch.ones(1, num_heads, lengths.get(name, 4), WIDTH) for name in ("query", "key"))
            with DividedAttention(SequenceCut(length=8, size=2), ranks, method):
                F.scaled_dot_product_attention(query, key, key)

        on_threads(2, work)

    with pytest.raises(ParallelPlanError, match="3 heads among 2 ranks"):
        attend(3, "heads")
    with pytest.raises(ParallelPlanError, match="4 queries to 12 keys, where each rank holds 4"):
        attend(2, "heads", key=12)
