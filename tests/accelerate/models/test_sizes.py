"""Sizes of models, held against the installed Accelerate."""

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain_accelerate.models import module_sizes as sizes
from drivetrain_accelerate.models import module_tensors
from drivetrain_accelerate.plugins.enums import CustomDtype
from drivetrain_weights.errors import TiedParametersError

theirs = pytest.importorskip("accelerate.utils.modeling")


@pytest.fixture
def model() -> Any:
    inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    built = nn.ModuleDict({"a": nn.Linear(4, 8), "norm": nn.BatchNorm1d(8), "b": inner})
    built.register_parameter("own", nn.Parameter(torch.ones(5)))
    built.register_buffer("mask", torch.ones(3), persistent=False)
    return built


def outcome(function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except ValueError:
        return "refused"


def test_sizes_are_read_alike() -> None:
    texts = ["1GB", "1GiB", "1.5GB", "1Gb", "10MB", "5KiB", "5TB", "7", "1gb", "-1GB", "12XB"]
    for size in (*texts, "1 GB", "", 5):
        mine, real = (outcome(room.convert_file_size_to_int, size) for room in (sizes, theirs))
        assert mine == real, size
    for dtype in (torch.bool, torch.float16, torch.int8, torch.float8_e4m3fn, torch.complex64):
        assert sizes.dtype_byte_size(dtype) == theirs.dtype_byte_size(dtype)
    real_dtypes = pytest.importorskip("accelerate.utils").CustomDtype
    for custom in CustomDtype:
        mine: Any = custom
        assert sizes.dtype_byte_size(mine) == theirs.dtype_byte_size(real_dtypes(custom.value))


@pytest.mark.parametrize("dtype", [None, torch.float16, "float16"])
@pytest.mark.parametrize("special", [None, {"a.weight": torch.float64}])
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_parts_of_a_model_have_the_same_size(model: Any, dtype: Any, special: Any, where: str) -> None:
    model.to(where)
    mine, real = (
        (
            *(dict(room.compute_module_sizes(model, dtype, special, only)) for only in (True, False)),
            room.compute_module_total_buffer_size(model, dtype, special),
        )
        for room in (sizes, theirs)
    )
    assert mine == real


def test_a_dtype_that_is_larger_or_has_no_name_in_torch_counts() -> None:
    """Accelerate counts the smaller of the two, though the weights will take more."""
    layer, dtype = nn.Linear(4, 4, dtype=torch.float16), torch.float32
    mine, real = (room.compute_module_sizes(layer, dtype)[""] for room in (sizes, theirs))
    assert (mine, real) == (80, 40)
    custom: Any = CustomDtype.INT4
    assert sizes.compute_module_sizes(nn.Linear(4, 4), custom)[""] == 10


@pytest.mark.parametrize("whole", [[], ["Sequential"], "Sequential"])
def test_the_largest_layers_are_the_same(model: Any, whole: Any) -> None:
    named, parts = sizes.compute_module_sizes(model), list(model.named_children())
    mine, real = (
        (
            room.get_max_layer_size(parts, named, whole),
            room.calculate_maximum_sizes(model),
            room.get_module_leaves(named),
            [
                room.get_module_size_with_ties(tied, 100, named, parts)
                for tied in (["a.weight"], ["a.weight", "b.0.weight"], [])
            ],
        )
        for room in (sizes, theirs)
    )
    assert mine == real


@pytest.mark.parametrize("limit", [3, 140, 200, 300, 600, "1KB"])
@pytest.mark.parametrize("whole", [None, ["Sequential"]])
def test_the_module_that_fits_is_the_same(model: Any, limit: int | str, whole: Any) -> None:
    named, (first, second, *parts) = sizes.compute_module_sizes(model), model.named_children()
    mine, real = (
        room.fallback_allocate([*parts, first, second], named, limit, whole) for room in (sizes, theirs)
    )
    assert mine[0] == real[0]
    assert [name for name, _ in mine[2]] == [name for name, _ in real[2]]


def test_tied_weights_are_found_and_tied_again(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    first, second = model["b"]
    second.weight = first.weight
    groups = module_tensors.find_tied_parameters(model)
    assert [list(group) for group in groups] == [list(group) for group in theirs.find_tied_parameters(model)]
    second.weight = nn.Parameter(first.weight.detach().clone())
    module_tensors.retie_parameters(model, groups)
    assert second.weight is first.weight
    module_tensors.check_tied_parameters_on_same_device(groups, {"b.0": 0, "b.1": 1, "": 1})
    assert "several devices: {'b.0.weight': 0, 'b.1.weight': 1}" in caplog.text
    mine, real = (room.check_tied_parameters_in_config(model) for room in (module_tensors, theirs))
    assert mine == real


@pytest.mark.parametrize("first_is_meta", [False, True])
def test_tensors_whose_values_differ_become_the_first_that_has_some(first_is_meta: bool) -> None:
    for room in (module_tensors, theirs):
        devices = {"a": "meta" if first_is_meta else None, "b": None, "c": None}
        model = nn.ModuleDict({name: nn.Linear(2, 2, device=each) for name, each in devices.items()})
        model.register_buffer("one", torch.ones(2))
        model.register_buffer("other", torch.zeros(2))
        kept: Any = model["b" if first_is_meta else "a"]
        values = kept.weight.detach().clone()
        room.retie_parameters(model, [["a.weight", "b.weight", "c.weight"], ["one", "other"], ["a.bias"]])
        assert {id(each.weight) for each in model.values()} == {id(kept.weight)}
        assert torch.equal(kept.weight, values)
        assert model.other is model.one


def test_tensors_that_cannot_be_one_are_refused() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 3)})
    before = model["b"].weight
    for other, said in (
        ("c.weight", r"the model has no parameter c\.weight"),
        ("b.weight", r"a\.weight \(2, 2\), b\.weight \(3, 2\): only tensors of the same shape"),
    ):
        with pytest.raises(TiedParametersError, match=said):
            module_tensors.retie_parameters(model, [["a.weight", other]])
    assert model["b"].weight is before
