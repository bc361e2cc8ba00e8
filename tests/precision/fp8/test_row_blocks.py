from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain_precision import LayerFilter, PrecisionError, TorchaoRecipe, convert_model
from drivetrain_precision.fp8.torchao_layers import BlockedFloat8Linear, BlockedMXFP8Linear

SCALINGS = ("tensorwise", "rowwise", "mxfp8")
MULTIPLE = {"tensorwise": 16, "rowwise": 16, "mxfp8": 32}


def layer(scaling: Any, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(32, 64, dtype=dtype)
    convert_model(made, TorchaoRecipe(scaling=scaling, layers=LayerFilter(skip_first=False, skip_last=False)))
    return made


def gradients(made: nn.Linear, rows: Tensor, num_rows: int) -> list[Tensor]:
    rows = rows.detach().requires_grad_()
    made.zero_grad()
    made(rows)[:num_rows].square().sum().backward()
    assert made.weight.grad is not None
    assert made.bias.grad is not None
    assert rows.grad is not None
    return [rows.grad[:num_rows], made.weight.grad.clone(), made.bias.grad.clone()]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("num_rows", [1, 15, 17, 33])
def test_an_odd_number_of_rows_equals_rows_of_zeros_added_by_hand(scaling: str, num_rows: int) -> None:
    made = layer(scaling)
    rows = torch.randn(num_rows, 32)
    missing = -num_rows % MULTIPLE[scaling]
    padded = torch.cat([rows, torch.zeros(missing, 32)])
    assert torch.equal(made(rows), made(padded)[:num_rows])
    for odd, whole in zip(gradients(made, rows, num_rows), gradients(made, padded, num_rows), strict=True):
        assert torch.equal(odd, whole)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_no_rows_give_no_rows_and_gradients_of_zero(scaling: str) -> None:
    made = layer(scaling)
    for shape in ((0, 32), (3, 0, 32)):
        output = made(torch.zeros(shape))
        assert output.shape == (*shape[:-1], 64)
        output.sum().backward()
    assert made.weight.grad is not None
    assert not made.weight.grad.any()


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", [(), (5,), (32,), (2, 3), (2, 16), (2, 3, 4), (2, 4, 8)])
def test_inputs_of_any_number_of_dims_give_what_the_plain_layer_gives(
    scaling: str, shape: tuple[int, ...]
) -> None:
    made = layer(scaling)
    rows = torch.randn(*shape, 32)
    output = made(rows)
    assert output.shape == (*shape, 64)
    expected = nn.functional.linear(rows, made.weight, made.bias)
    assert (output - expected).norm() / expected.norm() < 0.06


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_outputs_and_gradients_have_the_dtypes_of_a_plain_layer(
    scaling: str, dtype: torch.dtype, autocast: torch.dtype | None
) -> None:
    made = layer(scaling, dtype)
    rows = torch.randn(5, 32, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        output = made(rows)
    assert output.dtype == (autocast or dtype)
    output.float().square().sum().backward()
    assert made.weight.grad is not None
    assert rows.grad is not None
    assert made.weight.grad.dtype == made.bias.grad.dtype == rows.grad.dtype == dtype  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("made_inside", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_inference_mode_computes_what_no_grad_computes(
    scaling: str, made_inside: bool, autocast: bool
) -> None:
    rows = torch.randn(2, 3, 32)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with torch.no_grad():
            expected = layer(scaling)(rows)
        with torch.inference_mode(made_inside):
            made = layer(scaling)
        with torch.inference_mode():
            found = made(rows * 1)
    assert torch.equal(found, expected)
    assert not found.requires_grad


def test_a_compiled_layer_is_one_graph_in_inference_mode_too() -> None:
    made, rows = layer("tensorwise"), torch.randn(5, 32)
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        assert torch.equal(compiled(rows), made(rows))
    compiled(rows).sum().backward()
    assert made.weight.grad is not None


def test_nvfp4_off_a_gpu_is_an_error_that_says_what_computes_there() -> None:
    made = nn.Linear(128, 128)
    TorchaoRecipe(scaling="nvfp4").convert(made)
    with pytest.raises(PrecisionError, match="NVFP4 got an input on cpu: torchao computes NVFP4 on CUDA"):
        made(torch.randn(128, 128))


def test_the_blocks_are_those_that_the_formats_want() -> None:
    assert (BlockedFloat8Linear.row_multiple, BlockedMXFP8Linear.row_multiple) == (16, 32)
