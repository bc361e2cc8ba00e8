"""Resolve a device map to each tensor's home and the device that computes with it. Pure."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeGuard

import torch
from torch import nn

from drivetrain_dispatch.arguments import check_map
from drivetrain_dispatch.errors import DeviceMapError
from drivetrain_dispatch.model.model_layout import ModelLayout
from drivetrain_dispatch.model.sizes import enclosing_modules, nearest_entry
from drivetrain_dispatch.planning.device_map import HOST, Device, DeviceMap, Place, Tier, place_of, tier_of
from drivetrain_messages import list_some, suggest

_NUM_SHOWN = 5  # names in an error message


class Placement(NamedTuple):
    """The placement of a tensor."""

    home: Place  # the place that holds the tensor's values while no forward uses them
    device: torch.device

    @property
    def on_disk(self) -> bool:
        """True if the tensor's values are in a file while no forward uses them."""
        return tier_of(self.home) is Tier.DISK

    @property
    def stays(self) -> bool:
        """True if the tensor always stays on the device that computes with it."""
        return self.home == self.device

    @property
    def is_fetched(self) -> bool:
        """True if an accelerator fetches the tensor at each use; the host uses tensors where they are."""
        return not self.stays and self.device != HOST


def placements_of(
    layout: ModelLayout,
    device_map: Mapping[str, Device],
    *,
    main_device: Device | None = None,
    offload_buffers: bool = False,
) -> dict[str, Placement]:
    """Return where each parameter and buffer of a model is kept and computed, under every name that it has.

    The accelerator named last before an offloaded entry computes it; the main device computes offloaded entries at
    the beginning of the map. Without any accelerator the host computes. A tied tensor has one home: the first
    computing device among its names, otherwise the host rather than the disk.
    """
    entries = _entries_of(layout, device_map)
    places: dict[str, Place] = {name: place_of(device) for name, device in device_map.items()}
    if main_device is None and isinstance(device_map, DeviceMap) and not any(map(_computes, places.values())):
        # A plan that offloads everything names its computing device only in its windows.
        main_device = next(iter(device_map.window_bytes), None)
    main = None if main_device is None else place_of(main_device)
    if main == "disk":
        raise DeviceMapError("main_device='disk' does not compute: give an accelerator or 'cpu'")
    current = next(filter(_computes, places.values()), HOST) if main is None else main
    devices: dict[str, torch.device] = {}  # that compute each entry
    for name, place in places.items():
        current = place if _computes(place) else current
        devices[name] = current
    may_leave = entries.keys() - layout.running_statistics if offload_buffers else layout.parameters.keys()
    placements = {
        name: Placement(places[entry] if name in may_leave else devices[entry], devices[entry])
        for name, entry in entries.items()
    }
    for group in layout.aliases:
        if len(computing := {placements[name].device for name in group}) > 1:
            raise DeviceMapError(
                f"device_map: {' and '.join(map(repr, group))} are one tensor, which "
                f"{' and '.join(sorted(map(str, computing)))} would compute with: give them to one device"
            )
        fastest = min((placements[name] for name in group), key=lambda placement: tier_of(placement.home))
        placements.update(dict.fromkeys(group, fastest))
    return placements


def _computes(place: Place) -> TypeGuard[torch.device]:
    return tier_of(place) < Tier.HOST


def devices_of_parts(
    modules: Mapping[str, nn.Module], placements: Mapping[str, Placement]
) -> dict[str, torch.device]:
    """Return the devices of the model and of the outermost modules that one device computes alone."""
    inside: dict[str, set[torch.device]] = {}
    first: dict[str, torch.device] = {}
    for name, placement in placements.items():
        for outer in enclosing_modules(name):
            inside.setdefault(outer, set()).add(placement.device)
            first.setdefault(outer, placement.device)
    chosen = {"": first[""]}
    for name in modules:
        around = list(enclosing_modules(name)) if name else []
        alone = len(inside.get(name, ())) == 1
        if name and alone and all(len(inside[outer]) > 1 for outer in around):
            chosen[name] = first[name]
    return chosen


def places_of_tensors(layout: ModelLayout, devices: Mapping[str, Device]) -> dict[str, Place]:
    """Return where each parameter and buffer of a model goes, under every name that it has. Pure."""
    return {name: place_of(devices[entry]) for name, entry in _entries_of(layout, devices).items()}


def _entries_of(layout: ModelLayout, devices: Mapping[str, Device]) -> dict[str, str]:
    """Check a device map, and return the entry of each parameter and buffer."""
    check_map(
        devices, "; infer_auto_device_map(model) plans one, as load_checkpoint_and_dispatch can at once"
    )
    if unknown := sorted(devices.keys() - layout.modules.keys() - layout.tensors.keys()):
        known = [*layout.modules, *layout.tensors]
        meant = suggest(unknown[0], known) or "; see model.named_modules()"
        raise DeviceMapError(f"device_map: the model has no {_shown(unknown)}{meant}")
    for device in devices.values():
        place_of(device)
    chosen = {name: nearest_entry(name, devices) for name in layout.tensors}
    if left := [name for name, key in chosen.items() if key is None]:
        raise DeviceMapError(
            f'device_map: no device for {_shown(left)}: name them or a module around them; "" covers all others'
        )
    return {name: entry for name, entry in chosen.items() if entry is not None}


def check_places(places: Iterable[Place], argument: str = "device_map") -> None:
    """Check that this machine has the devices that an argument names."""
    for place in dict.fromkeys(places):
        if place == "disk" or tier_of(place) is not Tier.DEVICE:
            continue
        found = torch.accelerator.current_accelerator()
        count = torch.accelerator.device_count() if found is not None and found.type == place.type else 0
        if (place.index or 0) >= count:
            here = f"{count} of the kind {place.type}" if count else f"none of the kind {place.type}"
            raise DeviceMapError(f"{argument}: {place} is not here: this machine has {here}")


def _shown(names: list[str]) -> str:
    return list_some(map(repr, names), most=_NUM_SHOWN)
