"""How Transformer Engine's layers are counted, by plain modules that have its attributes `fp8_meta` and `fp8`."""

from typing import Any

import torch
from torch import Tensor, nn

from drivetrain_precision import TransformerEngineRecipe


class StandIn(nn.Module):
    """A layer whose products torch's record does not show as matrix products, as those of the library."""

    def __init__(self, *, fp8: bool = True, returns_bias: bool = False) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {}
        self.fp8, self.returns_bias = fp8, returns_bias
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        output = x * self.weight
        return (output, None) if self.returns_bias else output


def counted(layer: nn.Module, x: Tensor, *, backward: bool = True) -> tuple[int, int]:
    with TransformerEngineRecipe().counting() as counts:
        output = layer(x)
        if backward:
            (output[0] if isinstance(output, tuple) else output).sum().backward()
    return counts.scaled, counts.others


def test_a_forward_is_one_product_and_each_gradient_of_a_backward_that_runs_one_more() -> None:
    x = torch.ones(2, 4)
    assert counted(StandIn(), x, backward=False) == (1, 0)
    assert counted(StandIn(), x) == (2, 0)
    assert counted(StandIn(), x.clone().requires_grad_()) == (3, 0)
    assert counted(StandIn().requires_grad_(False), x.clone().requires_grad_()) == (2, 0)


def test_a_layer_that_computes_a_norm_too_always_has_the_gradient_of_the_products_input() -> None:
    layer: Any = StandIn()
    layer.layer_norm_weight = torch.ones(4)
    assert counted(layer, torch.ones(2, 4)) == (3, 0)


def test_a_layer_whose_output_comes_in_a_tuple_is_counted_as_another() -> None:
    assert counted(StandIn(returns_bias=True), torch.ones(2, 4)) == (2, 0)


def test_a_layer_that_does_not_compute_in_fp8_is_among_the_others() -> None:
    assert counted(StandIn(fp8=False), torch.ones(2, 4)) == (0, 2)


def test_a_forward_without_gradients_is_one_product() -> None:
    with torch.no_grad():
        assert counted(StandIn(), torch.ones(2, 4), backward=False) == (1, 0)


def test_an_output_that_the_loss_does_not_use_counts_no_backward() -> None:
    layer, other = StandIn(), StandIn()
    x = torch.ones(2, 4)
    with TransformerEngineRecipe().counting() as counts:
        layer(x)
        other(x).sum().backward()
    assert counts.scaled == 3


def test_a_backward_after_the_block_is_counted_with_its_forward() -> None:
    with TransformerEngineRecipe().counting() as counts:
        loss = StandIn()(torch.ones(2, 4)).sum()
    assert counts.scaled == 1
    loss.backward()
    assert (counts.scaled, counts.is_counted) == (2, True)


def test_plain_layers_are_counted_as_torch_records_them() -> None:
    assert counted(nn.Linear(4, 4), torch.ones(2, 4)) == (0, 2)
