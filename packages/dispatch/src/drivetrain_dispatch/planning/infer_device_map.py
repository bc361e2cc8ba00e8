"""Infer a device map from a model's sizes, the devices' memory budgets and the cost of each part of a forward."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from drivetrain_dispatch.errors import DeviceMapError
from drivetrain_dispatch.model.model_layout import ModelLayout, enclosing_modules
from drivetrain_dispatch.planning.bandwidth import measure_rates
from drivetrain_dispatch.planning.block_groups import BlockCost
from drivetrain_dispatch.planning.blocks import Block, blocks_of
from drivetrain_dispatch.planning.device_map import Device, DeviceMap, Tier, check_places, place_of, tier_of
from drivetrain_dispatch.planning.hardware import assumed_rates
from drivetrain_dispatch.planning.initial_placement import Budgets
from drivetrain_dispatch.planning.memory_budget import get_max_memory
from drivetrain_dispatch.planning.pipeline_model import Bandwidths
from drivetrain_dispatch.planning.solver import PlacePlan, plan_places
from drivetrain_messages import format_size


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[Device, int | str] | None = None,
    *,
    rates: Bandwidths | None = None,
    no_split_module_classes: Collection[str] = (),
    dtype: torch.dtype | None = None,
    special_dtypes: Mapping[str, torch.dtype] | None = None,
    special_sizes: Mapping[str, int] | None = None,
    costs: Mapping[str, BlockCost] | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Collection[str] = (),
) -> DeviceMap:
    """Plan where each part of a model goes, and predict how long a forward takes. Nothing is moved or loaded.

    The accelerators are filled in the order given. Parts that do not fit go to `"cpu"`, and beyond the host's budget
    to `"disk"`, spread evenly over the forward. Accelerators still compute these parts. Without accelerators `"cpu"`
    computes everything.

    Args:
        model: The model, ideally on the meta device.
        max_memory: The memory budget of each device, such as `{0: "20GB", "cpu": "60GB"}`; None takes what is free
            now. The disk is unlimited unless it is listed.
        rates: The transfer rates from the host and from the disk. None measures them if any weight is offloaded, and
            caches them in the user's cache folder: less than a second, once per machine. A device that this machine
            lacks gets typical rates of its kind; the printed map says so.
        no_split_module_classes: Names of module classes that stay whole, such as a layer with a residual connection.
        dtype: The dtype that floating-point and complex tensors will be converted to.
        special_dtypes: Dtypes of single tensors by name.
        special_sizes: Bytes of single tensors by name, as `quantized_sizes` returns them.
        costs: The cost of each part in a forward, by name.
        offload_buffers: Whether the model will be dispatched with offloaded buffers; otherwise buffers stay on the
            device that computes, and count towards its budget.
        preload_module_classes: Names of module classes whose weights will be fetched all at once.

    Returns:
        The map, with sizes, predicted times, and the window that each device reserves for fetched weights.

    Raises:
        DeviceMapError: The budgets cannot hold the model; the message names sufficient ones.
        ValueError: A named class or tensor is not in the model.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.Linear(1000, 1000))
        >>> dict(infer_auto_device_map(model, {"cpu": "6MB"}))
        {'0': 'cpu', '1': 'disk'}
    """
    layout = ModelLayout.of(
        model,
        dtype=dtype,
        special_dtypes=special_dtypes,
        special_sizes=special_sizes,
        at_once=preload_module_classes,
    )
    blocks = blocks_of(layout, no_split=no_split_module_classes, offload_buffers=offload_buffers)
    return plan_device_map(
        blocks, get_max_memory(max_memory), converts=layout.converts, costs=costs or {}, rates=rates
    )


def plan_device_map(
    blocks: Sequence[Block],
    budgets: Mapping[Device, int],
    *,
    converts: bool,
    costs: Mapping[str, BlockCost] | None = None,
    rates: Bandwidths | None = None,
) -> DeviceMap:
    """Return the map of a plan, with the transfer rates if the plan needed any."""
    # Where dtypes change, the host uses copies of weights on disk, not the files' pages.
    computing, room = split_budgets(budgets, in_place=not converts)
    described: str | None = None  # the rates, once the plan asks for them

    def transfer_rates() -> Bandwidths:
        nonlocal described
        found, source = rates, "given"
        if found is None:
            place = place_of(computing[0])
            try:
                check_places([place])
                found, source = measure_rates(str(place)), "measured"
            except DeviceMapError:
                found = assumed_rates("cuda" if place == "disk" else place.type)
                source = f"assumed, as {place} is not here"
        link, disk = format_size(found.to_device), format_size(found.from_disk)
        described = f"link {link}/s, disk {disk}/s ({source})"
        return found

    placed = plan_places(blocks, costs or {}, room, transfer_rates)
    planned = build_device_map(placed, blocks, computing, costs or {})
    planned.rates = described
    return planned


def stored_map(blocks: Sequence[Block], budgets: Mapping[Device, int]) -> DeviceMap | None:
    """Return a map that fills the devices in order, without regard to transfers; None if the disk is too small."""
    computing, _ = split_budgets(budgets)
    devices = [*computing, *(device for device in ("cpu",) if device in budgets and device not in computing)]
    left = [budgets.get(device, 0) for device in devices]
    grouped: dict[int, int] = {}
    for block in blocks:
        grouped[block.group] = grouped.get(block.group, 0) + block.size_bytes
    at = rest = 0
    places: dict[int, Device] = {}
    for group, size_bytes in grouped.items():
        while at < len(devices) and left[at] < size_bytes:
            at += 1
        places[group] = devices[at] if at < len(devices) else "disk"
        if at < len(devices):
            left[at] -= size_bytes
        else:
            rest += size_bytes
    if rest > budgets.get("disk", rest):
        return None
    chosen = {block.name: places[block.group] for block in blocks}
    return DeviceMap({outer: chosen[name] for name, outer in _outermost(chosen).items()})


def split_budgets(budgets: Mapping[Device, int], *, in_place: bool = True) -> tuple[list[Device], Budgets]:
    """Split budgets into computing devices' and storage budgets; `in_place` applies to a host that computes."""
    host = sum(size_bytes for device, size_bytes in budgets.items() if tier_of(device) is Tier.HOST)
    computing = [device for device in budgets if tier_of(device) < Tier.HOST]
    rooms = tuple(budgets[device] for device in computing)
    if not computing:
        return ["cpu"], Budgets(devices=(host,), host=0, disk=budgets.get("disk"), in_place=in_place)
    return computing, Budgets(devices=rooms, host=host, disk=budgets.get("disk"))


def build_device_map(
    plan: PlacePlan, blocks: Sequence[Block], computing: Sequence[Device], costs: Mapping[str, BlockCost]
) -> DeviceMap:
    """Return a plan as a device map with as few entries as possible, with sizes and times."""
    elsewhere: dict[Tier, Device] = {Tier.HOST: "cpu", Tier.DISK: "disk"}
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


def _outermost(devices: Mapping[str, Device]) -> dict[str, str]:
    """Return a dict from each name to its outermost enclosing name with all parts on one device."""
    common: dict[str, Device | None] = {}  # the device that all parts of a name share; None if they differ
    for name, device in devices.items():
        for outer in enclosing_modules(name):
            common[outer] = device if common.get(outer, device) == device else None
    return {
        name: next((outer for outer in enclosing_modules(name) if common[outer] is not None), name)
        for name in devices
    }
