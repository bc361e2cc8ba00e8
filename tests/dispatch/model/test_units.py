import pytest
import torch
from torch import nn

from drivetrain_dispatch.errors import DeviceMapError
from drivetrain_dispatch.model.model_layout import ModelLayout
from drivetrain_dispatch.model.units import check_devices, units_of


def shown(model: nn.Module, **options: object) -> dict[str, list[str]]:
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return {unit.name: list(unit.tensors) for unit in units_of(ModelLayout.of(model), names, **options)}


def test_a_module_brings_its_own_weights() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2, bias=False)))
    assert shown(model) == {"0": ["0.weight", "0.bias"], "2.0": ["2.0.weight"]}


def test_what_stays_whole_brings_what_is_inside() -> None:
    model = nn.Sequential(
        nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    )
    assert shown(model, whole=["Sequential"]) == {"": ["0.weight", "0.bias", "1.0.weight", "1.1.weight"]}


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
        check_devices(units_of(ModelLayout.of(model), names, whole=["Sequential"]), devices)


def test_a_class_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"preload_module_classes=\['Block'\]: the model has no module"):
        units_of(ModelLayout.of(nn.Linear(1, 1)), ["weight"], whole=["Block"])
