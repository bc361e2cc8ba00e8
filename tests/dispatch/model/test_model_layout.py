from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from drivetrain_dispatch import compute_module_sizes, init_empty_weights
from drivetrain_dispatch.errors import DeviceMapError
from drivetrain_dispatch.model.model_layout import ModelLayout, check_devices, enclosing_modules, units_of


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 2)
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 5)
        self.head.weight = self.embed.weight
        self.again = self.norm
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_parameter("shift", None)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_it_has_what_torch_lists_under_every_name(device: str) -> None:
    model = Tied()
    if device == "meta":
        model.to(device)
        model.head.weight = model.embed.weight
    layout = ModelLayout.of(model)
    assert list(layout.modules.items()) == list(model.named_modules(remove_duplicate=False))
    assert list(layout.parameters.items()) == list(model.named_parameters(remove_duplicate=False))
    assert list(layout.buffers.items()) == list(model.named_buffers(remove_duplicate=False))
    assert list(layout.tensors) == [*layout.parameters, *layout.buffers]
    assert ("embed.weight", "head.weight") in layout.aliases
    assert ("norm.weight", "again.weight") in layout.aliases
    assert sorted(name for names in layout.aliases for name in names) == sorted(layout.tensors)


def test_tensors_are_described_as_they_will_be() -> None:
    layout = ModelLayout.of(
        Tied(),
        dtype=torch.float16,
        special_dtypes={"head.bias": torch.float64},
        special_sizes={"embed.weight": 7},
    )
    assert layout.dtypes["norm.weight"] == torch.float16
    assert layout.dtypes["head.bias"] == torch.float64
    assert layout.dtypes["seen"] == torch.int64
    assert (layout.sizes["embed.weight"], layout.sizes["head.bias"], layout.sizes["seen"]) == (7, 40, 24)
    assert list(layout.sizes) == list(layout.dtypes) == list(layout.tensors)


def test_what_is_converted_to_its_own_dtype_is_not_converted() -> None:
    assert not ModelLayout.of(Tied()).converts
    assert not ModelLayout.of(Tied(), dtype=torch.float32).converts
    assert ModelLayout.of(Tied(), dtype=torch.bfloat16).converts
    assert ModelLayout.of(Tied(), special_dtypes={"seen": torch.int32}).converts


def test_running_statistics_are_what_norms_write_to() -> None:
    each = ("running_mean", "running_var", "num_batches_tracked")
    assert ModelLayout.of(Tied()).running_statistics == {
        f"{name}.{buffer}" for name in ("norm", "again") for buffer in each
    }


@pytest.mark.parametrize("argument", ["special_dtypes", "special_sizes"])
def test_names_that_the_model_lacks_are_refused(argument: str) -> None:
    with pytest.raises(ValueError, match=rf"{argument}=\['head.scale'\]: the model has no such parameter"):
        ModelLayout.of(Tied(), **{argument: {"head.scale": 1}})


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.arange(6), persistent=False)


EXPECTED = {
    "embed": 160, "embed.weight": 160, "blocks": 160, "blocks.0": 80, "blocks.0.weight": 64, "blocks.0.bias": 16,
    "blocks.1": 80, "blocks.1.weight": 64, "blocks.1.bias": 16, "head": 160, "head.weight": 160, "positions": 48,
    "": 160 + 160 + 48,
}  # fmt: skip


@pytest.mark.parametrize("empty", [False, True])
def test_every_part_has_its_size_and_what_is_tied_counts_once(empty: bool) -> None:
    with init_empty_weights(include_buffers=True) if empty else nullcontext():
        model = Model()
    assert compute_module_sizes(model) == EXPECTED
    sizes = compute_module_sizes(
        model, dtype=torch.bfloat16, special_dtypes={"blocks.0.weight": torch.float32}
    )
    assert (sizes[""], sizes["positions"]) == (80 + (64 + 8) + 40 + 48, 48)


def test_two_parameters_over_one_memory_count_once() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    model["b"].weight.data = model["a"].weight.data
    assert compute_module_sizes(model)[""] == 64


def test_a_module_under_two_names_counts_once() -> None:
    block = nn.Linear(4, 4)
    sizes = compute_module_sizes(nn.Sequential(block, block))
    assert (sizes[""], sizes["0"], sizes["1"]) == (80, 80, 80)


@given(st.lists(st.integers(min_value=1, max_value=5), min_size=1, max_size=5))
def test_a_model_is_the_sum_of_its_parts(widths: list[int]) -> None:
    model = nn.Sequential(*(nn.Linear(width, width) for width in widths))
    sizes = compute_module_sizes(model)
    assert sizes[""] == sum(sizes[str(index)] for index in range(len(widths)))
    assert sizes[""] == sum(parameter.numel() * 4 for parameter in model.parameters())


def test_the_modules_around_a_name_are_listed_inwards() -> None:
    assert list(enclosing_modules("a.b.weight")) == ["", "a", "a.b"]
    assert list(enclosing_modules("weight")) == [""]


def shown(model: nn.Module, **options: object) -> dict[str, list[str]]:
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return {unit.name: list(unit.tensors) for unit in units_of(ModelLayout.of(model, **options), names)}


def test_a_module_brings_its_own_weights() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2, bias=False)))
    assert shown(model) == {"0": ["0.weight", "0.bias"], "2.0": ["2.0.weight"]}


def test_what_stays_whole_brings_what_is_inside() -> None:
    model = nn.Sequential(
        nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    )
    assert shown(model, at_once=["Sequential"]) == {"": ["0.weight", "0.bias", "1.0.weight", "1.1.weight"]}


def test_attention_brings_what_it_uses_without_a_call() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2)})
    assert list(shown(model)) == ["attention"]
    assert len(shown(model)["attention"]) == 4


def test_a_list_of_weights_comes_with_the_module_around_it() -> None:
    model = nn.Sequential(nn.Module(), nn.Linear(1, 1))
    model[0].weights = nn.ParameterList([nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2))])
    assert shown(model)["0"] == ["0.weights.0", "0.weights.1"]
    assert shown(nn.ParameterList([nn.Parameter(torch.ones(1))])) == {"": ["0"]}


def test_a_module_in_two_places_is_one_unit() -> None:
    layer = nn.Linear(2, 2, bias=False)
    units = shown(nn.Sequential(layer, nn.ReLU(), layer))
    assert len(units) == 1


def test_only_the_weights_that_come_are_units() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert [unit.name for unit in units_of(ModelLayout.of(model), ["1.bias"])] == ["1"]


def test_a_unit_is_computed_by_one_device() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    names = [name for name, _ in model.named_parameters()]
    devices = {name: torch.device("cuda", int(name[0])) for name in names}
    check_devices(units_of(ModelLayout.of(model), names), devices)
    with pytest.raises(DeviceMapError, match="cuda:0, cuda:1 compute parts of 'the model'"):
        check_devices(units_of(ModelLayout.of(model, at_once=["Sequential"]), names), devices)


def test_a_class_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"preload_module_classes=\['Block'\]: the model has no module"):
        ModelLayout.of(nn.Linear(1, 1), at_once=["Block"])
