"""A device map from a model's sizes, the devices' budgets, and what each part of a forward costs."""

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn

from drivetrain_dispatch.blocks import blocks_of
from drivetrain_dispatch.budget import get_max_memory
from drivetrain_dispatch.device_map import Device, DeviceMap, place_of
from drivetrain_dispatch.plan import Budgets, Cost, plan_places
from drivetrain_dispatch.sizes import enclosing_modules
from drivetrain_dispatch.timeline import Rates

_CPU = torch.device("cpu")


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[Device, int | str] | None = None,
    *,
    rates: Rates,
    no_split_module_classes: Collection[str] = (),
    dtype: torch.dtype | None = None,
    special_dtypes: Mapping[str, torch.dtype] | None = None,
    costs: Mapping[str, Cost] | None = None,
) -> DeviceMap:
    """Plan where each part of a model goes, and predict how long a forward takes. Nothing is moved or loaded.

    What fits on the accelerators stays there, filled in the order given. Of a larger model, what does not fit goes to
    `"cpu"`, and beyond its budget to `"disk"`, spread evenly over the forward; accelerators compute it all the same.
    Without accelerators `"cpu"` computes everything.

    Args:
        model: The model, best on the meta device.
        max_memory: What each device may hold, such as `{0: "20GB", "cpu": "60GB"}`; None takes what is free now. The
            disk has no end unless it is among them.
        rates: How fast weights come from the host and from the disk.
        no_split_module_classes: Names of module classes that stay whole, such as a layer with a residual connection.
        dtype: What floating-point and complex tensors will be converted to.
        special_dtypes: Dtypes of single tensors by name.
        costs: What each part does in a forward, by its name.

    Returns:
        The map, with sizes and predicted times.

    Raises:
        DeviceMapError: The budgets cannot hold the model; the message says what would.
        ValueError: A class or tensor is named that the model does not have.
    """
    budgets = get_max_memory(max_memory)
    blocks = blocks_of(model, no_split=no_split_module_classes, dtype=dtype, special_dtypes=special_dtypes)
    places = {device: place_of(device) for device in budgets}
    host = sum(budgets[device] for device, place in places.items() if place == _CPU)
    computing = [device for device, place in places.items() if place not in ("disk", _CPU)]
    rooms = [budgets[device] for device in computing]
    if not computing:
        computing, rooms, host = ["cpu"], [host], 0
    room = Budgets(devices=tuple(rooms), host=host, disk=budgets.get("disk"))
    plan = plan_places(blocks, costs or {}, room, rates)
    elsewhere: dict[str, Device] = {"host": "cpu", "disk": "disk"}
    devices = {
        block.name: elsewhere.get(source, computing[at])
        for block, source, at in zip(blocks, plan.sources, plan.devices, strict=True)
    }
    outermost = _outermost(devices)
    merged = {outer: devices[name] for name, outer in outermost.items()}
    sizes, seconds = dict.fromkeys(merged, 0), dict.fromkeys(merged, 0.0)
    for block, turn in zip(blocks, plan.turns, strict=True):
        sizes[outermost[block.name]] += block.size_bytes
        seconds[outermost[block.name]] += turn.computed[1] - turn.computed[0]
    return DeviceMap(merged, sizes=sizes, seconds=seconds, depth=plan.depth)


def _outermost(devices: Mapping[str, Device]) -> dict[str, str]:
    """Of each name, the outermost one around it whose parts are all on one device."""
    inside: dict[str, set[Device]] = {}
    for name, device in devices.items():
        for outer in _around(name):
            inside.setdefault(outer, set()).add(device)
    return {name: next(outer for outer in _around(name) if len(inside[outer]) == 1) for name in devices}


def _around(name: str) -> Iterator[str]:
    yield from enclosing_modules(name)
    if name:
        yield name
