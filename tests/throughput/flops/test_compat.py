"""Each private name of torch's counter is what is relied on: these tests tell when a new torch changes one."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from drivetrain_throughput.flops.compat import ModelFlopCounter


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


@pytest.mark.skipif(
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu not in flop_registry,
    reason="torch before 2.15 does not count fused attention on the CPU",
)
def test_the_backward_of_fused_attention_counts_without_the_scores_that_it_repeats() -> None:
    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return scaled_dot_product_attention(x, x, x)

    product = 2 * 1 * 2 * 8 * 8 * 16  # batch, heads, queries, keys, size of a head
    assert counted(Attention(), torch.randn(1, 2, 8, 16, requires_grad=True), reentrant=None) == 6 * product
