"""A device map from a model's sizes, the devices' budgets, and what each part of a forward costs."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from drivetrain_dispatch.errors import DeviceMapError
from drivetrain_dispatch.model.sizes import dtype_after, named_tensors
from drivetrain_dispatch.planning.bandwidth import measure_rates
from drivetrain_dispatch.planning.block_groups import Cost
from drivetrain_dispatch.planning.blocks import Block, blocks_of
from drivetrain_dispatch.planning.device_map import Device, DeviceMap, check_places, place_of
from drivetrain_dispatch.planning.hardware import assumed_rates
from drivetrain_dispatch.planning.initial_placement import Budgets
from drivetrain_dispatch.planning.memory_budget import get_max_memory
from drivetrain_dispatch.planning.pipeline_model import Rates
from drivetrain_dispatch.planning.solver import PlacePlan, plan_places

_CPU = torch.device("cpu")


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[Device, int | str] | None = None,
    *,
    rates: Rates | None = None,
    no_split_module_classes: Collection[str] = (),
    dtype: torch.dtype | None = None,
    special_dtypes: Mapping[str, torch.dtype] | None = None,
    special_sizes: Mapping[str, int] | None = None,
    costs: Mapping[str, Cost] | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Collection[str] = (),
) -> DeviceMap:
    """Plan where each part of a model goes, and predict how long a forward takes. Nothing is moved or loaded.

    What fits on the accelerators stays there, filled in the order given. Of a larger model, what does not fit goes to
    `"cpu"`, and beyond its budget to `"disk"`, spread evenly over the forward; accelerators compute it all the same.
    Without accelerators `"cpu"` computes everything.

    Args:
        model: The model, best on the meta device.
        max_memory: What each device may hold, such as `{0: "20GB", "cpu": "60GB"}`; None takes what is free now. The
            disk has no end unless it is among them.
        rates: How fast weights come from the host and from the disk. None measures it, if something has to come, and
            keeps it in the user's cache folder: less than a second, once for a machine. For a device that is not here
            it takes what such devices have; the map says so when it is printed.
        no_split_module_classes: Names of module classes that stay whole, such as a layer with a residual connection.
        dtype: What floating-point and complex tensors will be converted to.
        special_dtypes: Dtypes of single tensors by name.
        special_sizes: Bytes of single tensors by name, as `quantized_sizes` gives them.
        costs: What each part does in a forward, by its name.
        offload_buffers: Whether the model will be dispatched so that buffers are kept away too; else they stay on the
            device that computes, and take its budget.
        preload_module_classes: Names of module classes whose weights will come all at once.

    Returns:
        The map, with sizes, predicted times, and the room that each device keeps for weights that come.

    Raises:
        DeviceMapError: The budgets cannot hold the model, and the message says what would.
        ValueError: A class or tensor is named that the model does not have.
    """
    budgets = get_max_memory(max_memory)
    blocks = blocks_of(
        model,
        no_split=no_split_module_classes,
        dtype=dtype,
        special_dtypes=special_dtypes,
        special_sizes=special_sizes,
        whole=preload_module_classes,
        offload_buffers=offload_buffers,
    )
    computing, room = rooms_of(budgets, in_place=not _converts(model, dtype, special_dtypes))

    return _planned(blocks, costs or {}, room, computing, rates)


def _planned(
    blocks: Sequence[Block],
    costs: Mapping[str, Cost],
    room: Budgets,
    computing: Sequence[Device],
    rates: Rates | None,
) -> DeviceMap:
    """The map of a plan, with the rates that it was made for, if any were asked for."""
    used: list[_Found] = []

    def found() -> Rates:
        used.append(_found(computing[0]) if rates is None else _Found(rates, "given"))
        return used[0].rates

    planned = map_of(plan_places(blocks, costs, room, found), blocks, computing, costs)
    if used:
        planned.rates = shown_rates(used[0].rates, used[0].source)
    return planned


def shown_rates(rates: Rates, source: str) -> str:
    """The rates of a plan in a line: what they are, and how that is known."""
    link, disk = rates.to_device / 1e9, rates.from_disk / 1e9
    return f"link {link:,.3g} GB/s, disk {disk:,.3g} GB/s ({source})"


def _converts(
    model: nn.Module, dtype: torch.dtype | None, special_dtypes: Mapping[str, torch.dtype] | None
) -> bool:
    """Whether a tensor becomes another dtype: what is on the disk is then computed with as a copy, not in place."""
    special = special_dtypes or {}
    return (dtype is not None or bool(special)) and any(
        dtype_after(tensor, dtype, special.get(name)) != tensor.dtype for name, tensor in named_tensors(model)
    )


def rooms_of(budgets: Mapping[Device, int], *, in_place: bool = True) -> tuple[list[Device], Budgets]:
    """Which devices compute, in the order given, and what each may hold; without accelerators the host computes.

    Args:
        budgets: Bytes by device.
        in_place: Whether a host that computes uses weights of the disk where they are.
    """
    places = {device: place_of(device) for device in budgets}
    host = sum(budgets[device] for device, place in places.items() if place == _CPU)
    computing = [device for device, place in places.items() if place not in ("disk", _CPU)]
    rooms = [budgets[device] for device in computing]
    if not computing:
        return ["cpu"], Budgets(devices=(host,), host=0, disk=budgets.get("disk"), in_place=in_place)
    return computing, Budgets(devices=tuple(rooms), host=host, disk=budgets.get("disk"))


def map_of(
    plan: PlacePlan, blocks: Sequence[Block], computing: Sequence[Device], costs: Mapping[str, Cost]
) -> DeviceMap:
    """A plan as a map with as few names as say it, with sizes and times."""
    elsewhere: dict[str, Device] = {"host": "cpu", "disk": "disk"}
    devices = {
        block.name: elsewhere.get(source, computing[at])
        for block, source, at in zip(blocks, plan.sources, plan.devices, strict=True)
    }
    outermost = _outermost(devices)
    merged = {outer: devices[name] for name, outer in outermost.items()}
    sizes, seconds = dict.fromkeys(merged, 0), dict.fromkeys(merged, 0.0)
    for block in blocks:
        sizes[outermost[block.name]] += block.size_bytes
        if block.name in costs:
            seconds[outermost[block.name]] += costs[block.name].seconds
    windows = {device: size for device, size in zip(computing, plan.windows, strict=True) if size}
    return DeviceMap(merged, sizes=sizes, seconds=seconds, window_bytes=windows)


class _Found(NamedTuple):
    """How fast weights come, and how that is known."""

    rates: Rates
    source: str


def _found(device: Device) -> _Found:
    """How fast weights come to a device: measured if it is here, as such devices are if not."""
    place = place_of(device)
    try:
        check_places([place])
    except DeviceMapError:
        kind = "cuda" if place == "disk" else place.type
        return _Found(assumed_rates(kind), f"assumed, as {place} is not here")
    return _Found(measure_rates(str(place)), "measured")


def _outermost(devices: Mapping[str, Device]) -> dict[str, str]:
    """Of each name, the outermost one around it whose parts are all on one device."""
    common: dict[
        str, Device | None
    ] = {}  # of each name the device of all its parts; None if they have several
    for name, device in devices.items():
        outer: str | None = name
        while outer is not None:
            if outer not in common:
                common[outer] = device
            elif common[outer] in (None, device):
                break  # what is further out has it already
            else:
                common[outer] = None
            outer = _around(outer)
    found: dict[str, str] = {}
    return {name: _furthest(name, common, found) for name in devices}


def _furthest(name: str, common: Mapping[str, Device | None], found: dict[str, str]) -> str:
    """The outermost name around one whose parts are all on one device; `found` remembers."""
    if name not in found:
        outer = _around(name)
        found[name] = name if outer is None or common[outer] is None else _furthest(outer, common, found)
    return found[name]


def _around(name: str) -> str | None:
    """The name of the module around a name."""
    return name.rpartition(".")[0] if name else None
