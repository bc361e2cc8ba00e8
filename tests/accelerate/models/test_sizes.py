"""Sizes of models, held against the installed Accelerate."""

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain_accelerate.models import module_sizes as sizes
from drivetrain_accelerate.models import tied_weights
from drivetrain_accelerate.plugins.enums import CustomDtype
from drivetrain_weights.errors import TiedParametersError

theirs = pytest.importorskip("accelerate.utils.modeling")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.b = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.own = nn.Parameter(torch.ones(5))
        self.register_buffer("mask", torch.ones(3), persistent=False)


def outcome(function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except ValueError:
        return "refused"


@pytest.mark.parametrize(
    "size", ["1GB", "1GiB", "1.5GB", "1Gb", "10MB", "5KiB", "5TB", "7", "1gb", "1 GB", 5, "-1GB", "12XB", ""]
)
def test_sizes_are_read_alike(size: int | str) -> None:
    assert outcome(sizes.convert_file_size_to_int, size) == outcome(theirs.convert_file_size_to_int, size)


def test_elements_have_the_same_size() -> None:
    for dtype in (torch.bool, torch.float16, torch.int8, torch.float8_e4m3fn, torch.complex64):
        assert sizes.dtype_byte_size(dtype) == theirs.dtype_byte_size(dtype)
    for custom in CustomDtype:
        real: Any = pytest.importorskip("accelerate.utils").CustomDtype(custom.value)
        mine: Any = custom
        assert sizes.dtype_byte_size(mine) == theirs.dtype_byte_size(real)


@pytest.mark.parametrize("dtype", [None, torch.float16, "float16"])
@pytest.mark.parametrize("special", [None, {"a.weight": torch.float64}])
@pytest.mark.parametrize("buffers_only", [True, False])
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_parts_of_a_model_have_the_same_size(
    dtype: Any, special: Any, buffers_only: bool, where: str
) -> None:
    model = Model().to(where)
    mine = sizes.compute_module_sizes(model, dtype, special, buffers_only)
    assert mine == dict(theirs.compute_module_sizes(model, dtype, special, buffers_only))
    assert sizes.compute_module_total_buffer_size(
        model, dtype, special
    ) == theirs.compute_module_total_buffer_size(model, dtype, special)


def test_a_dtype_that_is_larger_counts() -> None:
    """Accelerate counts the smaller of the two, though the weights will take more."""
    layer = nn.Linear(4, 4, dtype=torch.float16)
    assert sizes.compute_module_sizes(layer, torch.float32)[""] == 80  # type: ignore[arg-type]
    assert theirs.compute_module_sizes(layer, torch.float32)[""] == 40


def test_dtypes_without_a_name_in_torch_count() -> None:
    dtype: Any = CustomDtype.INT4
    assert sizes.compute_module_sizes(nn.Linear(4, 4), dtype)[""] == 10


@pytest.mark.parametrize("whole", [[], ["Sequential"], "Sequential"])
def test_the_largest_layers_are_the_same(whole: Any) -> None:
    model = Model()
    named = sizes.compute_module_sizes(model)
    parts = list(model.named_children())
    assert sizes.get_max_layer_size(parts, named, whole) == theirs.get_max_layer_size(parts, named, whole)
    assert sizes.calculate_maximum_sizes(model) == theirs.calculate_maximum_sizes(model)
    assert sizes.get_module_leaves(named) == theirs.get_module_leaves(named)


def test_modules_that_share_weights_are_counted_together() -> None:
    model = Model()
    named, parts = sizes.compute_module_sizes(model), list(model.named_children())
    for tied in (["a.weight"], ["a.weight", "b.0.weight"], []):
        mine, real = (room.get_module_size_with_ties(tied, 100, named, parts) for room in (sizes, theirs))
        assert mine == real


@pytest.mark.parametrize("limit", [3, 140, 200, 300, 600, "1KB"])
@pytest.mark.parametrize("whole", [None, ["Sequential"]])
def test_the_module_that_fits_is_the_same(limit: int | str, whole: Any) -> None:
    model = Model()
    named, parts = (
        sizes.compute_module_sizes(model),
        list(model.named_children())[2:] + list(model.named_children())[:2],
    )
    mine, real = (room.fallback_allocate(parts, named, limit, whole) for room in (sizes, theirs))
    assert mine[0] == real[0]
    assert [name for name, _ in mine[2]] == [name for name, _ in real[2]]


def test_tied_weights_are_found_and_tied_again(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    model.b[1].weight = model.b[0].weight
    groups = tied_weights.find_tied_parameters(model)
    assert [list(group) for group in groups] == [list(group) for group in theirs.find_tied_parameters(model)]
    model.b[1].weight = nn.Parameter(model.b[0].weight.detach().clone())
    tied_weights.retie_parameters(model, groups)
    assert model.b[1].weight is model.b[0].weight
    tied_weights.check_tied_parameters_on_same_device(groups, {"b.0": 0, "b.1": 1, "": 1})
    assert "several devices: {'b.0.weight': 0, 'b.1.weight': 1}" in caplog.text
    assert tied_weights.check_tied_parameters_in_config(model) == theirs.check_tied_parameters_in_config(
        model
    )


@pytest.mark.parametrize("first_is_meta", [False, True])
def test_tensors_whose_values_differ_become_the_first_that_has_some(first_is_meta: bool) -> None:
    for room in (tied_weights, theirs):
        model = nn.ModuleDict(
            {
                name: nn.Linear(2, 2, device="meta" if name == "a" and first_is_meta else None)
                for name in "abc"
            }
        )
        model.register_buffer("one", torch.ones(2))
        model.register_buffer("other", torch.zeros(2))
        kept: Any = model["b" if first_is_meta else "a"]
        values = kept.weight.detach().clone()
        room.retie_parameters(model, [["a.weight", "b.weight", "c.weight"], ["one", "other"], ["a.bias"]])
        assert {id(each.weight) for each in model.values()} == {id(kept.weight)}
        assert torch.equal(kept.weight, values)
        assert model.other is model.one
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 3)})
    before = model["b"].weight
    with pytest.raises(TiedParametersError, match=r"the model has no parameter c\.weight"):
        tied_weights.retie_parameters(model, [["a.weight", "c.weight"]])
    with pytest.raises(
        TiedParametersError, match=r"a\.weight \(2, 2\), b\.weight \(3, 2\): tensors of one shape"
    ):
        tied_weights.retie_parameters(model, [["a.weight", "b.weight"]])
    assert model["b"].weight is before
