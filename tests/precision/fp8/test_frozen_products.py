"""Layers with frozen weights: the same numbers as torchao's own, without the product that nobody needs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain_precision import LayerFilter, TorchaoRecipe, convert_model
from drivetrain_precision.fp8.product_counts import counting_products

ALL = LayerFilter(skip_first=False, skip_last=False)
SCALINGS = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8", "mxfp8_with_gw_hp")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 96))


def results(scaling: Any, *, frozen: bool, rows: int, **options: Any) -> tuple[Tensor, Tensor]:
    model = net().requires_grad_(not frozen)
    convert_model(model, TorchaoRecipe(scaling=scaling, layers=ALL, **options))
    inputs = torch.randn(2, rows, 64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(inputs)
    output.float().square().mean().backward()
    assert inputs.grad is not None
    assert all((p.grad is None) == frozen for p in model.parameters())
    return output, inputs.grad


@pytest.mark.parametrize("rows", [16, 5])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_output_and_gradient_of_the_input_are_those_of_a_trained_layer(scaling: str, rows: int) -> None:
    for found, expected in zip(
        results(scaling, frozen=True, rows=rows), results(scaling, frozen=False, rows=rows), strict=True
    ):
        assert torch.equal(found, expected)


def test_rounded_scales_are_those_of_a_trained_layer() -> None:
    pairs = (results("tensorwise", frozen=each, rows=16, round_scales=True) for each in (True, False))
    assert all(torch.equal(*both) for both in zip(*pairs, strict=True))


def products(scaling: Any, *, frozen: bool) -> int:
    model = net()
    convert_model(model, TorchaoRecipe(scaling=scaling, layers=ALL))
    if frozen:
        model[2].requires_grad_(False)
    with counting_products() as counts:
        model(torch.randn(32, 64)).square().mean().backward()
    return counts.scaled + counts.others


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_gradient_of_a_frozen_weight_is_not_computed(scaling: str) -> None:
    assert products(scaling, frozen=True) == products(scaling, frozen=False) - 1


@pytest.mark.parametrize("scaling", ["tensorwise", "mxfp8"])
@pytest.mark.slow
def test_a_frozen_layer_compiles_to_the_same_numbers(scaling: Any) -> None:
    model = net().requires_grad_(False)
    convert_model(model, TorchaoRecipe(scaling=scaling, layers=ALL))
    found: list[Tensor] = []
    for forward in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(1), requires_grad=True)
        forward(inputs).square().mean().backward()
        assert inputs.grad is not None
        found.append(inputs.grad)
    torch.testing.assert_close(found[0], found[1])
