"""Device maps, held against the installed Accelerate."""

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain_accelerate.models import device_maps
from drivetrain_dispatch import DeviceMapError

theirs = pytest.importorskip("accelerate.utils.modeling")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(4)))
        self.head = nn.Linear(8, 10)


@pytest.fixture
def model() -> Model:
    return Model().to("meta")


def test_budgets_are_bytes_in_the_same_order() -> None:
    given: Any = {"cpu": "1GB", 1: "2GB", 0: 5, "disk": 4}
    mine = device_maps.get_max_memory(dict(given))
    assert list(mine.items()) == [(0, 5), (1, 2 * 10**9), ("cpu", 10**9), ("disk", 4)]
    assert mine == theirs.get_max_memory(dict(given))
    changed = dict(given)
    device_maps.get_max_memory(changed)
    assert changed["cpu"] == 10**9
    assert list(device_maps.get_max_memory())[-1] == "cpu"


@pytest.mark.parametrize(
    "entries",
    [
        {"a.b": 0, "a.c": 0, "d": 1, "e.f.g": 2, "e.f.h": 2, "e.k": 1},
        {"a": 0, "b": 0},
        {"a": 0, "b": 1},
        {"a.b.c": 0, "a.b.d": 1, "a.e": 0},
        {"": 0},
    ],
)
def test_maps_are_shortened_alike(entries: dict[str, Any]) -> None:
    mine = device_maps.clean_device_map(dict(entries))
    assert mine == theirs.clean_device_map(dict(entries))


def uncovered(check: Any, model: nn.Module, entries: dict[str, Any]) -> list[str]:
    """The parameters that an error says have no device."""
    try:
        check(model, entries)
    except ValueError as error:
        return [name for name, _ in model.named_parameters() if name in str(error)]
    return []


@pytest.mark.parametrize("entries", [{"": 0}, {"embed": 0}, {"embed": 0, "blocks": 1, "head": "cpu"}])
def test_maps_are_checked_alike(model: Model, entries: dict[str, Any]) -> None:
    assert uncovered(device_maps.check_device_map, model, entries) == uncovered(
        theirs.check_device_map, model, entries
    )


def test_names_that_the_model_lacks_are_told(model: Model) -> None:
    for room in (device_maps, theirs):
        with pytest.warns(UserWarning, match=r"\['other'\]"):
            room.check_device_map(model, {"": 0, "other": 1})


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("whole", [None, ["Sequential", "NotInThisModel"]])
def test_a_plan_covers_the_model_within_the_budgets(model: Model, clean: bool, whole: Any) -> None:
    budgets: Any = {"cpu": 1500}
    planned = device_maps.infer_auto_device_map(model, budgets, whole, clean_result=clean)
    theirs.check_device_map(model, planned)
    assert set(planned.values()) == {"cpu", "disk"}
    sizes = theirs.compute_module_sizes(model)
    assert sum(sizes[name] for name, device in planned.items() if device == "cpu") <= 1500
    if not clean:
        assert "" not in planned
        assert "blocks.0.0" in planned or whole
    assert device_maps.infer_auto_device_map(model, {"cpu": "1GB"}) == {"": "cpu"}


def test_accelerators_share_a_model(model: Model) -> None:
    given: Any = {0: 10**6, 1: 10**6, "cpu": 10**6}
    budgets = device_maps.get_balanced_memory(model, dict(given))
    assert list(budgets) == [0, 1, "cpu"]
    total = theirs.compute_module_sizes(model)[""]
    assert total / 2 <= budgets[0] < total
    assert device_maps.get_balanced_memory(model, dict(given), low_zero=True)[0] == 0
    planned = device_maps.infer_auto_device_map(model, dict(budgets), ["Sequential"])  # type: ignore[arg-type]
    assert {0, 1} <= set(planned.values())


def test_a_model_that_fits_nowhere_is_an_error(model: Model) -> None:
    with pytest.raises(DeviceMapError, match="disk"):
        device_maps.infer_auto_device_map(model, {"cpu": 10, "disk": 10})


def test_classes_that_a_model_has_are_found(model: Model) -> None:
    assert device_maps.present_classes(model, ["Linear", "Other"]) == ["Linear"]
    assert device_maps.present_classes(model, "Linear") == ["Linear"]
    assert device_maps.present_classes(model, None) == []
    assert torch.device("meta") == model.head.weight.device
