import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from drivetrain_dispatch.errors import DeviceMapError
from drivetrain_dispatch.model.model_layout import ModelLayout, compute_module_sizes
from drivetrain_dispatch.planning.bandwidth import default_cache
from drivetrain_dispatch.planning.block_groups import BlockCost
from drivetrain_dispatch.planning.device_map import placements_of, read_device_map
from drivetrain_dispatch.planning.infer_device_map import infer_auto_device_map
from drivetrain_dispatch.planning.pipeline_model import Bandwidths

RATES = Bandwidths(to_device=1e6, from_disk=1e5)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)  # 256 bytes
        self.second = nn.Linear(8, 8, bias=False)


class Model(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)  # 1024 bytes
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.norm = nn.LayerNorm(8)  # 64 bytes
        self.head = nn.Linear(8, 32, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_what_fits_is_one_line() -> None:
    found = infer_auto_device_map(Model(), {0: 10_000, "cpu": 10_000}, rates=RATES)
    assert found == {"": 0}
    assert found.sizes == {"": 1024 + 4 * 512 + 64 + 1024}


def test_accelerators_are_filled_in_order_and_names_are_as_short_as_may_be() -> None:
    found = infer_auto_device_map(Model(), {0: 2400, 1: 5000}, rates=RATES)
    assert found == {
        "embed": 0, "layers.0": 0, "layers.1": 0, "layers.2.first": 0, "layers.2.second": 1, "layers.3": 1,
        "norm": 1, "head": 1,
    }  # fmt: skip
    whole = infer_auto_device_map(Model(), {0: 2400, 1: 5000}, rates=RATES, no_split_module_classes=["Layer"])
    assert whole == {
        "embed": 0, "layers.0": 0, "layers.1": 0, "layers.2": 1, "layers.3": 1, "norm": 1, "head": 1
    }  # fmt: skip


def test_the_rest_goes_to_the_host_and_then_to_the_disk() -> None:
    budgets = {0: 3400, "cpu": 600}
    found = infer_auto_device_map(Model(), budgets, rates=RATES, no_split_module_classes=["Layer"])
    assert set(found.values()) == {0, "cpu", "disk"}
    for device, most in budgets.items():
        assert sum(found.sizes[name] for name, there in found.items() if there == device) <= most
    read_device_map(ModelLayout.of(Model()), found)  # every tensor has a place


def test_without_accelerators_the_host_computes() -> None:
    assert infer_auto_device_map(Model(), {"cpu": 10_000}, rates=RATES) == {"": "cpu"}
    found = infer_auto_device_map(Model(), {"cpu": 3000}, rates=RATES)
    assert set(found.values()) == {"cpu", "disk"}


def test_dtypes_and_costs_count() -> None:
    budgets = {0: 2200, "cpu": 10_000}
    half = infer_auto_device_map(Model(), budgets, rates=RATES, dtype=torch.bfloat16)
    assert half == {"": 0}
    costs = {"head": BlockCost(peak_bytes=500)}
    assert infer_auto_device_map(Model(), budgets, rates=RATES, dtype=torch.bfloat16, costs=costs) != {"": 0}


def test_times_are_those_of_the_parts() -> None:
    costs = {
        "embed": BlockCost(seconds=0.5),
        "layers.0.first": BlockCost(seconds=1.0),
        "layers.1.second": BlockCost(seconds=2.0),
    }
    found = infer_auto_device_map(Model(), {0: 2400, 1: 5000}, rates=RATES, costs=costs)
    assert {name: seconds for name, seconds in found.seconds.items() if seconds} == {
        "embed": 0.5, "layers.0": 1.0, "layers.1": 2.0
    }  # fmt: skip


def test_rates_are_asked_for_only_if_something_is_offloaded() -> None:
    # A device that no machine has, so that nothing can be measured of it.
    assert infer_auto_device_map(Model(), {"cuda:99": 10_000}) == {"": "cuda:99"}
    found = infer_auto_device_map(Model(), {"cuda:99": 3400, "cpu": 10_000})
    assert found.rates == "link 25.00 GB/s, disk 3.00 GB/s (assumed, as cuda:99 is not here)"
    assert str(found).endswith(found.rates)
    given = infer_auto_device_map(Model(), {"cuda:99": 3400, "cpu": 10_000}, rates=RATES)
    assert given.rates == "link 1.00 MB/s, disk 100.00 kB/s (given)"


def test_without_rates_those_of_this_machine_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    found = infer_auto_device_map(Model(), {"cpu": 3000})
    assert set(found.values()) == {"cpu", "disk"}
    assert default_cache().is_relative_to(tmp_path)
    assert len(json.loads(default_cache().read_text())) == 2


def experts(num_layers: int, num_experts: int) -> nn.Module:
    with torch.device("meta"):
        layers = [
            nn.ModuleDict(
                {
                    "router": nn.Linear(8, num_experts),
                    "experts": nn.ModuleList(Layer() for _ in range(num_experts)),
                    "norm": nn.LayerNorm(8),
                }
            )
            for _ in range(num_layers)
        ]
        return nn.Sequential(nn.Embedding(32, 8), *layers, nn.Linear(8, 32))


def test_experts_are_spread_over_all_there_is() -> None:
    model = experts(3, 16)
    total = compute_module_sizes(model)[""]
    budgets = {0: total // 3, 1: total // 3, "cpu": total // 6}
    found = infer_auto_device_map(model, budgets, rates=RATES)
    assert set(found.values()) == {0, 1, "cpu", "disk"}
    assert sum(found.sizes.values()) == total
    for device, most in budgets.items():
        assert sum(found.sizes[name] for name, there in found.items() if there == device) <= most
    assert read_device_map(ModelLayout.of(model), found).keys() == {
        name for name, _ in model.named_parameters()
    }


@given(st.integers(1500, 9000), st.integers(1500, 9000))
def test_the_fewest_names_say_where_every_part_is(first: int, second: int) -> None:
    model = experts(1, 4)
    found = infer_auto_device_map(model, {0: first, 1: second, "cpu": 1000}, rates=RATES)
    names = [name for name, module in model.named_modules() if not list(module.children())]
    around = {name: [outer for outer in found if is_in(name, outer)] for name in names}
    assert all(len(outers) == 1 for outers in around.values())
    for outer in filter(None, found):  # no name could be shorter
        wider = outer.rpartition(".")[0]
        assert len({found[around[name][0]] for name in names if is_in(name, wider)}) > 1


def is_in(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")


class Seven(nn.Module):
    """A layer of seven linears, as a language model has."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.attention = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.wide = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(2))
        self.down = nn.Linear(4 * width, width)


def test_layers_that_stay_whole_leave_no_room_unused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(Seven() for _ in range(20)))
    sizes = compute_module_sizes(model)
    budget = sizes[""] // 2
    found = infer_auto_device_map(
        model, {0: budget, "cpu": sizes[""]}, rates=RATES, no_split_module_classes=["Seven"]
    )
    stays = sum(found.sizes[name] for name, there in found.items() if there == 0)
    assert found.window_bytes[0] >= sizes["0.down"]
    assert budget - sizes["0"] < stays + found.window_bytes[0] <= budget
    assert stays == 9 * sizes["0"]  # the tenth gives its room to the window


def test_buffers_of_offloaded_modules_count_unless_they_are_offloaded() -> None:
    class Tabled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=False)  # 256 bytes
            self.register_buffer("table", torch.zeros(256))  # 1024 bytes

    model = nn.Sequential(*(Tabled() for _ in range(8)))
    given = {"rates": RATES, "no_split_module_classes": ["Tabled"]}
    with pytest.raises(
        DeviceMapError, match=r"8.19 kB stay for the whole model \(buffers.* at least 8.45 kB"
    ):
        infer_auto_device_map(model, {0: 4000, "cpu": 100_000}, **given)
    for offload_buffers, most in ((False, 9000), (True, 4000)):
        found = infer_auto_device_map(
            model, {0: most, "cpu": 100_000}, offload_buffers=offload_buffers, **given
        )
        assert set(found.values()) == {0, "cpu"}
        layout = ModelLayout.of(model)
        placed = placements_of(layout, found, offload_buffers=offload_buffers)
        stays = sum(layout.tensors[name].nbytes for name, placement in placed.items() if placement.stays)
        assert stays + found.window_bytes[0] <= most


@pytest.mark.parametrize(("count", "width", "budget", "fit"), [(9, 1790, "40MB", 3), (16, 1024, "20MB", 4)])
def test_a_host_alone_uses_all_that_it_may(count: int, width: int, budget: str, fit: int) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))
    found = infer_auto_device_map(model, {"cpu": budget}, rates=RATES)
    assert list(found.values()).count("cpu") == fit
    assert found.window_bytes == {}
    converted = infer_auto_device_map(model, {"cpu": budget}, rates=RATES, dtype=torch.float64)
    assert converted.window_bytes["cpu"] > 0  # what is converted comes as a copy


def test_weights_that_come_all_at_once_have_their_window() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(Seven() for _ in range(6)))
    sizes = compute_module_sizes(model)
    found = infer_auto_device_map(
        model, {0: 3 * sizes["0"], "cpu": sizes[""]}, rates=RATES, preload_module_classes=["Seven"]
    )
    assert found.window_bytes[0] >= sizes["0"]


def test_a_map_by_which_everything_comes_names_its_device_by_the_window() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    found = infer_auto_device_map(model, {"cuda:0": 300, "cpu": 10_000}, rates=RATES)
    assert set(found.values()) == {"cpu"}
    assert {placement.device for placement in placements_of(ModelLayout.of(model), found).values()} == {
        torch.device("cuda:0")
    }
