"""The device map: a dict from names of a model's parts to devices, its table, and its meaning for each tensor."""

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import IntEnum
from math import isclose
from typing import Literal, NamedTuple, TypeAlias, TypeGuard, cast

import torch
from torch import nn

from drivetrain_dispatch.errors import DeviceMapError
from drivetrain_dispatch.model.model_layout import ModelLayout, enclosing_modules, nearest_entry
from drivetrain_messages import format_size, format_table, list_some, suggest

# A device as users write it: an accelerator's index, a string such as "cuda:1", "cpu" or "disk", or a torch.device.
Device: TypeAlias = int | str | torch.device
# The same in canonical form; "disk" only stores weights, another device computes with them.
Place: TypeAlias = torch.device | Literal["disk"]
HOST = torch.device("cpu")
_NUM_SHOWN = 5  # names in an error message


class Tier(IntEnum):
    """The tiers of storage, the fastest first; META is for tensors without values."""

    META = 0
    DEVICE = 1
    HOST = 2
    DISK = 3


class DeviceMap(dict[str, Device]):
    """A dict from names of modules, parameters or buffers to the devices that hold them; `""` is the whole model.

    The longest entry that is a prefix of a tensor's name decides. A map is a plain dict. It prints as a table with
    the bytes and the predicted seconds of each name in a forward, and the transfer rates that the plan assumes.

    `window_bytes` is the maximum of fetched bytes on each device at once, weights in use included. A device without
    an entry keeps room for any three consecutive parts.

    Example:
        >>> DeviceMap({"embed": 0, "head": "cpu"})["head"]
        'cpu'
    """

    def __init__(
        self,
        devices: Mapping[str, Device],
        *,
        sizes: Mapping[str, int] | None = None,
        seconds: Mapping[str, float] | None = None,
        window_bytes: Mapping[Device, int] | None = None,
        rates: str | None = None,
    ) -> None:
        super().__init__(devices)
        self.sizes = dict(sizes or {})
        self.seconds = dict(seconds or {})
        self.rates = rates
        self.window_bytes = dict(window_bytes or {})
        for device, size_bytes in self.window_bytes.items():
            if type(size_bytes) is not int or size_bytes < 0:
                raise ValueError(
                    f"window_bytes[{device!r}]={size_bytes!r}: give a number of bytes, 0 or more, or leave the "
                    "device out: it keeps room for any three parts that follow each other"
                )

    def __str__(self) -> str:
        """Return a table of modules, devices, sizes and predicted times if known, followed by windows and rates."""
        timed = any(self.seconds.values())
        lines = [["module", "device", "size of each", *(["time"] if timed else [])]]
        for row in rows_of(self, self.sizes, self.seconds):
            size = "" if row.size_bytes is None else format_size(row.size_bytes)
            time = "" if row.seconds is None else f"{row.seconds * 1e3:,.2f} ms"
            lines.append([row.name or "(the model)", row.where(), size, *([time] if timed else [])])
        shown = [format_table(lines, right=[2, 3])]
        windows = [
            f"{device} keeps {format_size(size)} for what comes" for device, size in self.window_bytes.items()
        ]
        return "\n".join([*shown, *windows, *([] if self.rates is None else [self.rates])])


class Row(NamedTuple):
    """A row of a device map's table."""

    name: str  # the name of a module, or of several: `layers.0-21`
    devices: tuple[Device, ...]
    size_bytes: int | None
    seconds: float | None

    def where(self) -> str:
        """Return the device that all modules share, or the number of modules on each device."""
        counts = Counter(map(str, self.devices))
        if len(counts) == 1:
            return str(self.devices[0])
        order = sorted(counts, key=lambda device: (device == "disk", device == "cpu", device))
        return ", ".join(f"{counts[device]} on {device}" for device in order)


def rows_of(
    devices: Mapping[str, Device], sizes: Mapping[str, int], seconds: Mapping[str, float]
) -> list[Row]:
    """Return the rows of a table. Consecutive modules that are alike and on one accelerator share a row. Pure."""
    rows: list[Row] = []
    stem, last, computing = "", "", None  # of the previous row
    for name, device in devices.items():
        outer, _, number = name.rpartition(".")
        row = Row(name, (device,), sizes.get(name), seconds.get(name))
        computes = device if device not in ("cpu", "disk") else computing
        follows = outer == stem and number.isdecimal() and last.isdecimal() and int(number) == int(last) + 1
        same_device = None in (computing, computes) or computes == computing
        before = rows[-1] if rows else row._replace(size_bytes=-1)
        times = (before.seconds or 0.0, row.seconds or 0.0)
        near = (before.seconds is None) == (row.seconds is None) and isclose(*times, rel_tol=1e-3)
        if follows and same_device and near and before.size_bytes == row.size_bytes:
            first = rows[-1].name.removesuffix(f"-{last}")
            rows[-1] = rows[-1]._replace(name=f"{first}-{number}", devices=(*rows[-1].devices, device))
        else:
            rows.append(row)
        stem, last, computing = outer, number, computes
    return rows


def place_of(device: Device) -> Place:
    """Return the canonical form of a device that a user names."""
    if device == "disk":
        return "disk"
    if isinstance(device, str) and device.isdecimal():
        raise DeviceMapError(f"{device!r} is no device: give the number {int(device)}, without quotes")
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        found = torch.accelerator.current_accelerator()
        return torch.device("cuda" if found is None else found.type, device)
    try:
        return torch.device(str(device))  # also refuses a negative index
    except RuntimeError as error:
        raise DeviceMapError(
            f"{device!r} is no device: give the number of an accelerator, a name such as 'cuda:0' or 'cpu', or 'disk'"
        ) from error


def tier_of(device: Device) -> Tier:
    """Return the tier of storage that a device belongs to."""
    place = place_of(device)
    if place == "disk":
        return Tier.DISK
    return {"cpu": Tier.HOST, "meta": Tier.META}.get(place.type, Tier.DEVICE)


def as_others_see_it(device_map: Mapping[str, Device]) -> dict[str, Device]:
    """Return an equivalent map whose first device computes: transformers' pipelines put inputs on that device."""
    # The first accelerator computes weights on disk before it anyway; the host does if there is only the disk.
    first = next((name for name, device in device_map.items() if tier_of(device) is not Tier.DISK), None)
    if first is None:
        return dict.fromkeys(device_map, "cpu")
    return {first: device_map[first]} | dict(device_map)


class Placement(NamedTuple):
    """The placement of a tensor."""

    home: Place  # the place that holds the tensor's values while no forward uses them
    device: torch.device  # the device that computes with it

    @property
    def on_disk(self) -> bool:
        """True if the tensor's values are in a file while no forward uses them."""
        return self.home == "disk"

    @property
    def stays(self) -> bool:
        """True if the tensor always stays on the device that computes with it."""
        return self.home == self.device

    @property
    def is_fetched(self) -> bool:
        """True if an accelerator fetches the tensor at each use; the host uses tensors where they are."""
        return not self.stays and self.device != HOST


def check_map(device_map: object, otherwise: str = "") -> None:
    """Check that a device map is a mapping from names to devices."""
    if isinstance(device_map, Mapping):
        names = [name for name in cast("Mapping[object, object]", device_map) if not isinstance(name, str)]
        if names:
            raise DeviceMapError(
                f"device_map={{{names[0]!r}: ...}}: names are text, as named_modules() gives them: {str(names[0])!r}"
            )
        return
    example = 'give a map from names to devices, such as {"": "cpu"}'
    try:
        is_device = device_map == "disk" or bool(torch.device(cast("str", device_map)))
    except (RuntimeError, TypeError):
        is_device = False
    if is_device:
        shown = device_map if isinstance(device_map, int) else str(device_map)
        example += f'; for the whole model on one device {{"": {shown!r}}}'
    raise DeviceMapError(f"device_map={device_map!r}: {example}{otherwise}")


def read_device_map(
    layout: ModelLayout, device_map: Mapping[str, Device], *, main_device: Device | None = None
) -> dict[str, Placement]:
    """Check a device map, and return the placement of each tensor by its own entry, without regard to ties. Pure.

    The accelerator named last before an offloaded entry computes it; the main device computes offloaded entries at
    the beginning of the map. Without any accelerator the host computes.
    """
    check_map(
        device_map, "; infer_auto_device_map(model) plans one, as load_checkpoint_and_dispatch can at once"
    )
    if unknown := sorted(device_map.keys() - layout.modules.keys() - layout.tensors.keys()):
        known = [*layout.modules, *layout.tensors]
        meant = suggest(unknown[0], known) or "; see model.named_modules()"
        raise DeviceMapError(f"device_map: the model has no {_show(unknown)}{meant}")
    places: dict[str, Place] = {name: place_of(device) for name, device in device_map.items()}
    entries = {name: nearest_entry(name, device_map) for name in layout.tensors}
    if left := [name for name, entry in entries.items() if entry is None]:
        raise DeviceMapError(
            f'device_map: no device for {_show(left)}: name them or a module around them; "" covers all others'
        )
    if main_device is None and isinstance(device_map, DeviceMap) and not any(map(_computes, places.values())):
        # A plan that offloads everything names its computing device only in its windows.
        main_device = next(iter(device_map.window_bytes), None)
    main = None if main_device is None else place_of(main_device)
    if main == "disk":
        raise DeviceMapError("main_device='disk' does not compute: give an accelerator or 'cpu'")
    current = next(filter(_computes, places.values()), HOST) if main is None else main
    placements: dict[str, Placement] = {}  # of each entry
    for name, place in places.items():
        current = place if _computes(place) else current
        placements[name] = Placement(place, current)
    return {name: placements[entry] for name, entry in entries.items() if entry is not None}


def placements_of(
    layout: ModelLayout,
    device_map: Mapping[str, Device],
    *,
    main_device: Device | None = None,
    offload_buffers: bool = False,
) -> dict[str, Placement]:
    """Return the placement of each parameter and buffer of a model, under each of its names.

    A tied tensor has one home: the first computing device among its names, otherwise the host, and the disk last.
    Buffers that are not offloaded, and all running statistics, stay on the device that computes.
    """
    placements = read_device_map(layout, device_map, main_device=main_device)
    for name in layout.running_statistics if offload_buffers else layout.buffers:
        placements[name] = placements[name]._replace(home=placements[name].device)
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
    """Return the devices of the model and of the outermost modules that a single device computes."""
    inside: dict[str, set[torch.device]] = {}
    for name, placement in placements.items():
        for outer in enclosing_modules(name):
            inside.setdefault(outer, set()).add(placement.device)
    chosen = {"": next(iter(placements.values())).device}
    for name in modules:
        alone = name and len(inside.get(name, ())) == 1
        if alone and all(len(inside[outer]) > 1 for outer in enclosing_modules(name)):
            (chosen[name],) = inside[name]
    return chosen


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


def _show(names: list[str]) -> str:
    return list_some(map(repr, names), most=_NUM_SHOWN)
