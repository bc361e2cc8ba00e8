import pytest
import torch
from torch import nn

from drivetrain_dispatch.errors import DeviceMapError
from drivetrain_dispatch.model.model_layout import ModelLayout
from drivetrain_dispatch.planning.device_map import (
    Device,
    DeviceMap,
    Place,
    Placement,
    check_places,
    place_of,
    placements_of,
    read_device_map,
)

CPU, ONE, TWO = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


def model_of_two() -> nn.Module:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "ab": nn.Sequential(nn.Linear(2, 2, bias=False))})
    model.register_buffer("seen", torch.zeros(1))
    return model


def homes_of(model: nn.Module, devices: dict[str, Device]) -> dict[str, Place]:
    placements = read_device_map(ModelLayout.of(model), devices)
    return {name: placement.home for name, placement in placements.items()}


def test_the_longest_name_decides() -> None:
    devices = {"": "cpu", "a": "disk", "a.bias": "cuda:1", "ab.0": torch.device("meta")}
    assert homes_of(model_of_two(), devices) == {
        "a.weight": "disk",
        "a.bias": torch.device("cuda", 1),
        "ab.0.weight": torch.device("meta"),
        "seen": CPU,
    }


def test_a_name_is_no_prefix_of_a_longer_word() -> None:
    with pytest.raises(DeviceMapError, match=r"no device for 'ab.0.weight', 'seen': name them or a module"):
        read_device_map(ModelLayout.of(model_of_two()), {"a": "cpu"})


def test_names_that_are_not_there_are_refused_with_what_was_meant() -> None:
    with pytest.raises(DeviceMapError, match=r"the model has no 'a.weigth'; did you mean a.weight"):
        read_device_map(ModelLayout.of(model_of_two()), {"": "cpu", "a.weigth": "disk"})


def test_many_names_are_shortened() -> None:
    model = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(9))
    with pytest.raises(DeviceMapError, match=r"'5.weight' and 3 more: name"):
        read_device_map(ModelLayout.of(model), {"0": "cpu"})


def test_a_shared_parameter_may_be_named_by_all_its_names() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(2, 2), "head": nn.Linear(2, 2, bias=False)})
    model["head"].weight = model["embed"].weight
    assert homes_of(model, {"": "cpu"}) == {"embed.weight": CPU, "head.weight": CPU}


def test_numbers_are_accelerators() -> None:
    kind = torch.accelerator.current_accelerator()
    assert place_of(3) == torch.device(kind.type if kind else "cuda", 3)


@pytest.mark.parametrize("device", ["gpu", "cuda:x", None, 1.5, True, "hdd"])
def test_what_is_no_device_is_refused(device) -> None:
    with pytest.raises(DeviceMapError, match="is no device: give the number of an accelerator"):
        place_of(device)


def test_devices_that_are_not_here_are_refused() -> None:
    check_places(["disk", CPU, torch.device("meta")])
    with pytest.raises(DeviceMapError, match=r"cuda:99 is not here: this machine has "):
        check_places([torch.device("cuda", 99)])


def test_it_is_a_dict_and_prints_as_a_table() -> None:
    devices = DeviceMap({"": "cpu", "layer": 0}, sizes={"layer": 2_500_000}, seconds={"layer": 0.0015})
    assert devices == {"": "cpu", "layer": 0}
    assert str(devices).splitlines() == [
        "module       device  size of each     time",
        "(the model)  cpu",
        "layer        0            2.50 MB  1.50 ms",
    ]


def test_layers_that_are_alike_share_a_line_until_another_accelerator_computes() -> None:
    places: list[Device] = [0, "cpu", 0, "disk", "cpu", 1, 1, "disk"]
    devices: dict[str, Device] = {f"layers.{index}": device for index, device in enumerate(places)}
    sizes = dict.fromkeys(devices, 1000000) | {"layers.7": 2_000_000, "head": 1_000_000}
    lines = str(DeviceMap(devices | {"head": 1}, sizes=sizes)).splitlines()
    assert [line.split(maxsplit=1) for line in lines[1:]] == [
        ["layers.0-4", "2 on 0, 2 on cpu, 1 on disk       1.00 MB"],
        ["layers.5-6", "1                                 1.00 MB"],
        ["layers.7", "disk                              2.00 MB"],
        ["head", "1                                 1.00 MB"],
    ]


def model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(5)))


def test_what_is_kept_elsewhere_is_computed_by_the_accelerator_before_it() -> None:
    devices = {"0": "cpu", "1": "cuda:0", "2": "disk", "3": "cuda:1", "4": "cpu"}
    assert placements_of(ModelLayout.of(model()), devices) == {
        "0.weight": Placement(CPU, ONE),
        "1.weight": Placement(ONE, ONE),
        "2.weight": Placement("disk", ONE),
        "3.weight": Placement(TWO, TWO),
        "4.weight": Placement(CPU, TWO),
    }


def test_the_main_device_computes_what_comes_before_any() -> None:
    placements = placements_of(ModelLayout.of(model()), {"0": "disk", "": "cuda:1"}, main_device="cuda:0")
    assert placements["0.weight"] == Placement("disk", ONE)
    assert placements["1.weight"] == Placement(TWO, TWO)


def test_without_an_accelerator_the_host_computes() -> None:
    placements = placements_of(ModelLayout.of(model()), {"0": "disk", "": "cpu"})
    assert placements["0.weight"] == Placement("disk", CPU)
    assert placements["1.weight"].stays


def test_buffers_stay_unless_asked_and_running_statistics_always() -> None:
    layers = nn.Sequential(nn.BatchNorm1d(2), nn.Module())
    layers[1].register_buffer("table", torch.ones(2))
    kept = placements_of(ModelLayout.of(layers), {"": "cpu"}, main_device="cuda:0")
    assert {name for name, placement in kept.items() if not placement.stays} == {"0.weight", "0.bias"}
    away = placements_of(ModelLayout.of(layers), {"": "cpu"}, main_device="cuda:0", offload_buffers=True)
    assert {name for name, placement in away.items() if not placement.stays} == {
        "0.weight",
        "0.bias",
        "1.table",
    }


@pytest.mark.parametrize(
    ("devices", "home"),
    [
        (("cuda:0", "disk"), ONE),
        (("disk", "cuda:0"), ONE),
        (("disk", "cpu"), CPU),
        (("disk", "disk"), "disk"),
    ],
)
def test_a_tied_weight_has_one_home(devices: tuple[str, str], home: object) -> None:
    layers = model()[:2]
    layers[1].weight = layers[0].weight
    placements = placements_of(ModelLayout.of(layers), dict(zip("01", devices, strict=True)))
    assert {placement.home for placement in placements.values()} == {home}
    with pytest.raises(
        DeviceMapError, match=r"'0\.weight' and '1\.weight' are one tensor, which cuda:0 and cuda:1"
    ):
        placements_of(ModelLayout.of(layers), {"0": "cuda:0", "1": "cuda:1"})
