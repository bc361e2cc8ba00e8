"""How much memory each device may give to a model: what is free now, what a user says, or as evenly as it goes."""

import re
from collections.abc import Collection, Mapping

import psutil
import torch
from torch import nn

from drivetrain_dispatch.arguments import check_budgets
from drivetrain_dispatch.planning.blocks import blocks_of
from drivetrain_dispatch.planning.cgroup import free_of_cgroup
from drivetrain_dispatch.planning.device_map import Device, place_of

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]+)")
_UNITS = {"B": 1} | {
    prefix + unit: base**power
    for base, unit in ((1000, "B"), (1024, "iB"))
    for power, prefix in enumerate("KMGT", start=1)
}
_LEFT_FREE = 0.05  # of a device: allocators do not fill it to the last byte


def get_max_memory(max_memory: Mapping[Device, int | str] | None = None) -> dict[Device, int]:
    """What each device may hold, in bytes.

    Args:
        max_memory: Sizes such as 10**9, "24GB" (powers of 1000) or "24GiB" (powers of 1024) by device. None takes
            what is free now of every accelerator of this process and of the host's memory, but for a twentieth.

    Returns:
        Bytes by device, in the order given; accelerators by number, then `"cpu"`.

    Raises:
        DeviceMapError: There is no such kind of device.
        ValueError: It is no map, or a size is none.
    """
    if max_memory is not None:
        check_budgets(max_memory)
        for device in max_memory:
            place_of(device)
        return {device: parse_size(size) for device, size in max_memory.items()}
    free: dict[Device, int] = {}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        for index in range(torch.accelerator.device_count()):
            free[index] = _free_of(torch.device(accelerator.type, index))
    free["cpu"] = free_of_host()
    return {device: int(size_bytes * (1 - _LEFT_FREE)) for device, size_bytes in free.items()}


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[Device, int | str] | None = None,
    *,
    no_split_module_classes: Collection[str] = (),
    dtype: torch.dtype | None = None,
    special_dtypes: Mapping[str, torch.dtype] | None = None,
    special_sizes: Mapping[str, int] | None = None,
    low_zero: bool = False,
) -> dict[Device, int]:
    """Budgets by which a model is spread evenly over the accelerators, rather than filling the first ones.

    Args:
        model: The model; may be on the meta device.
        max_memory: What each device may hold, as `get_max_memory` takes it.
        no_split_module_classes: Names of module classes that stay whole.
        dtype: What floating-point and complex tensors will be converted to.
        special_dtypes: Dtypes of single tensors by name.
        special_sizes: Bytes of single tensors by name, as `quantized_sizes` gives them.
        low_zero: Whether the first accelerator gets only what the others cannot hold, for generation for instance,
            which happens there.

    Returns:
        Bytes by device: never more than `max_memory` says; `"cpu"` and `"disk"` as they were.
    """
    budgets = get_max_memory(max_memory)
    blocks = blocks_of(
        model,
        no_split=no_split_module_classes,
        dtype=dtype,
        special_dtypes=special_dtypes,
        special_sizes=special_sizes,
    )
    spread = [device for device in budgets if _is_accelerator(device)]
    total = sum(block.size_bytes for block in blocks)
    if len(spread) < 2:
        return budgets
    first, *others = spread
    sharing = others if low_zero else spread
    # A block goes to one device, so that each may get the largest one beyond its even share.
    share = -(-total // len(sharing)) + max((block.size_bytes for block in blocks), default=0)
    balanced = dict(budgets)
    for device in sharing[:-1]:
        balanced[device] = min(budgets[device], share)
    if low_zero:
        balanced[first] = min(budgets[first], max(0, total - sum(balanced[device] for device in others)))
    return balanced


def parse_size(size: int | str) -> int:
    """Bytes of a size such as 1000, "5GB" (powers of 1000) or "512MiB" (powers of 1024); the case is free.

    Raises:
        ValueError: It is no size.
    """
    if type(size) is int and size >= 0:
        return size
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise ValueError(
            f"{size!r} is no size: give one with a unit such as '24GB' or '512MiB', or an int of bytes (units: "
            f"{', '.join(_UNITS)})"
        )
    return int(float(match[1]) * units[match[2].lower()])


def free_bytes(device: torch.device) -> int | None:
    """What a device has free for this process now; None where it does not say.

    The host's counts what it can take from the cache of files, and what it can swap out.
    """
    if device.type == "cpu":
        return free_of_host() + int(psutil.swap_memory().free)
    try:
        return _free_of(device)
    except ValueError:
        return None


def free_of_host() -> int:
    """What the host has free for this process: of the machine, and of the container."""
    available = int(psutil.virtual_memory().available)
    of_container = free_of_cgroup()
    return available if of_container is None else min(available, of_container)


def _is_accelerator(device: Device) -> bool:
    place = place_of(device)
    return place != "disk" and place.type not in ("cpu", "meta")


def _free_of(device: torch.device) -> int:
    """What an accelerator has free for this process, with what torch keeps of it unused.

    Raises:
        ValueError: It does not say.
    """
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        raise ValueError(
            f'{device} does not say how much memory is free: give max_memory={{{device.index}: "16GB", ...}}'
        )
    cached = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    return int(module.mem_get_info(device)[0]) + cached
