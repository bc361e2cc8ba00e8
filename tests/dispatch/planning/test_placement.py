import pytest
import torch
from torch import nn

from drivetrain_dispatch.errors import DeviceMapError
from drivetrain_dispatch.model.model_layout import ModelLayout
from drivetrain_dispatch.planning.placement import Placement, placements_of

CPU, ONE, TWO = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


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
