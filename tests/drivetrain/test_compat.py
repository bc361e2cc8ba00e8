"""Each private name of torch is what the umbrella relies on: these tests tell when a new torch changes one."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.optim import SGD
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.checkpoint import checkpoint

from drivetrain.compat import ModelFlopCounter, milestones_of, schedulers_in


def optimizer() -> SGD:
    return SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


def test_a_sequence_tells_its_schedulers_and_when_it_goes_on() -> None:
    stepped = optimizer()
    parts = [LinearLR(stepped), ConstantLR(stepped), CosineAnnealingLR(stepped, T_max=5)]
    sequence = SequentialLR(stepped, parts, milestones=[2, 4])
    assert list(schedulers_in(sequence)) == parts
    assert list(milestones_of(sequence)) == [2, 4]


def test_a_chain_tells_its_schedulers_which_all_run_from_the_start() -> None:
    stepped = optimizer()
    parts = [LinearLR(stepped), ConstantLR(stepped)]
    chain = ChainedScheduler(parts, stepped)
    assert list(schedulers_in(chain)) == parts
    assert list(milestones_of(chain)) == []


def test_a_single_scheduler_has_neither() -> None:
    scheduler = LinearLR(optimizer())
    assert list(schedulers_in(scheduler)) == []
    assert list(milestones_of(scheduler)) == []


def counted(function: torch.nn.Module, x: torch.Tensor, *, reentrant: bool | None) -> int:
    """The operations of a forward and its backward, repeated if `reentrant` says how."""
    with ModelFlopCounter(is_in_backward=False) as forward:
        y = function(x) if reentrant is None else checkpoint(function, x, use_reentrant=reentrant)
    with ModelFlopCounter(is_in_backward=True) as backward:
        y.sum().backward()
    return forward.get_total_flops() + backward.get_total_flops()


class Product(torch.autograd.Function):
    """A product of matrices, whose forward runs without grad mode, as that of every autograd.Function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(8, 16), torch.randn(16, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(Product.apply(x, self.weights[0]).tanh(), self.weights[1])


class FewLayers(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


@pytest.mark.parametrize("kind", [FewLayers, OwnFunction])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_that_is_repeated_inside_backward_is_not_counted(
    reentrant: bool, kind: type[nn.Module]
) -> None:
    model = kind()
    x = torch.randn(4, 8, requires_grad=True)
    assert (
        counted(model, x, reentrant=reentrant) == counted(model, x, reentrant=None) == 3 * 2 * 2 * 4 * 8 * 16
    )


def test_the_backward_of_fused_attention_counts_without_the_scores_that_it_repeats() -> None:
    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return scaled_dot_product_attention(x, x, x)

    product = 2 * 1 * 2 * 8 * 8 * 16  # batch, heads, queries, keys, size of a head
    assert counted(Attention(), torch.randn(1, 2, 8, 16, requires_grad=True), reentrant=None) == 6 * product
