"""Device maps, held against the installed Accelerate."""

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain_accelerate.models import device_maps
from drivetrain_dispatch import DeviceMapError
from drivetrain_dispatch.model.model_layout import nearest_entry

theirs = pytest.importorskip("accelerate.utils.modeling")


@pytest.fixture
def model() -> nn.ModuleDict:
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(4)))
    parts = {"embed": nn.Embedding(10, 8), "blocks": blocks, "head": nn.Linear(8, 10)}
    return nn.ModuleDict(parts).to("meta")


def test_budgets_are_bytes_in_the_same_order() -> None:
    given: Any = {"cpu": "1GB", 1: "2GB", 0: 5, "disk": 4}
    mine = device_maps.get_max_memory(changed := dict(given))
    assert list(mine.items()) == [(0, 5), (1, 2 * 10**9), ("cpu", 10**9), ("disk", 4)]
    assert mine == theirs.get_max_memory(dict(given))
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
    assert device_maps.clean_device_map(dict(entries)) == theirs.clean_device_map(dict(entries))


def test_maps_are_checked_alike(model: nn.Module) -> None:
    for room in (device_maps, theirs):
        room.check_device_map(model, {"embed": 0, "blocks": 1, "head": "cpu"})
        with pytest.raises(ValueError, match=r"blocks\.0\.0\.weight.*head\.bias") as refused:
            room.check_device_map(model, {"embed": 0})
        assert "embed" not in str(refused.value).split(":")[0]
        with pytest.warns(UserWarning, match=r"\['other'\]"):
            room.check_device_map(model, {"": 0, "other": 1})


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("whole", [None, ["Sequential", "NotInThisModel"]])
def test_a_plan_covers_the_model_within_the_budgets(model: nn.Module, clean: bool, whole: Any) -> None:
    planned = device_maps.infer_auto_device_map(model, {"cpu": 1500}, whole, clean_result=clean)
    theirs.check_device_map(model, planned)
    assert set(planned.values()) == {"cpu", "disk"}
    sizes = theirs.compute_module_sizes(model)
    assert sum(sizes[name] for name, device in planned.items() if device == "cpu") <= 1500
    assert clean or ("" not in planned and ("blocks.0.0" in planned or whole))
    assert device_maps.infer_auto_device_map(model, {"cpu": "1GB"}) == {"": "cpu"}


def test_accelerators_share_a_model(model: nn.Module) -> None:
    given: Any = {0: 10**6, 1: 10**6, "cpu": 10**6}
    budgets = device_maps.get_balanced_memory(model, dict(given))
    assert list(budgets) == [0, 1, "cpu"]
    total = theirs.compute_module_sizes(model)[""]
    assert total / 2 <= budgets[0] < total
    assert device_maps.get_balanced_memory(model, dict(given), low_zero=True)[0] == 0
    planned = device_maps.infer_auto_device_map(model, {**budgets}, ["Sequential"])
    assert {0, 1} <= set(planned.values())


def test_where_no_plan_keeps_the_budgets_it_is_told(
    model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(DeviceMapError, match="disk"):
        device_maps.infer_auto_device_map(model, {"cpu": 10, "disk": 10})
    assert device_maps.infer_auto_device_map(model, {0: 10, "cpu": 10}) == {"": "disk"}
    assert "keeps the budgets between forwards alone" in caplog.text


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("buffer", torch.ones(8))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(30))


BUDGETS: tuple[dict[Any, int], ...] = (
    {0: 50, 1: 1000}, {0: 200, 1: 200}, {0: 200}, {0: 100, "cpu": 300}, {"cpu": 10}, {0: 0, "cpu": 1000},
    {0: 10, 1: 10, "cpu": 10}, {"cpu": 100, "disk": 10_000}, {"disk": 10_000}, {0: 300, 1: 300, 2: 300},
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:Current model requires")
@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("whole", [None, ["Block"]])
@pytest.mark.parametrize("kind", [Tied, Block, lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))])
def test_there_is_a_map_for_budgets_that_no_forward_keeps(kind: Any, whole: Any, buffers: bool) -> None:
    for budgets in BUDGETS:
        found = kind()
        planned = device_maps.infer_auto_device_map(found, dict(budgets), whole, offload_buffers=buffers)
        device_maps.check_device_map(found, planned)
        assert theirs.infer_auto_device_map(found, dict(budgets), whole, offload_buffers=buffers)
        sizes = dict.fromkeys(budgets, 0)
        for name, tensor in (*found.named_parameters(), *found.named_buffers()):
            if (device := planned[nearest_entry(name, planned) or ""]) != "disk":
                sizes[device] += tensor.nbytes
        assert all(sizes[device] <= size for device, size in budgets.items()), (budgets, planned)


def test_classes_that_a_model_has_are_found(model: nn.Module) -> None:
    for named, found in ((["Linear", "Other"], ["Linear"]), ("Linear", ["Linear"]), (None, [])):
        assert device_maps.present_classes(model, named) == found
