"""The memory budget of each device: the free memory, a size from the user, or an even share."""

from collections.abc import Iterable, Mapping
from typing import cast

import psutil
import torch

from drivetrain_dispatch.planning.blocks import Block
from drivetrain_dispatch.planning.device_map import Device, Tier, place_of, tier_of
from drivetrain_memory.batch_size.host_limit import available_host_bytes
from drivetrain_messages import parse_size

_LEFT_FREE = 0.05  # the fraction of a device that stays free: allocators do not fill it to the last byte


def get_max_memory(max_memory: Mapping[Device, int | str] | None = None) -> dict[Device, int]:
    """Return the memory budget of each device, in bytes.

    Args:
        max_memory: Sizes such as 10**9, "24GB" (powers of 1000) or "24GiB" (powers of 1024) by device. None takes
            95 % of the memory that is free now on every accelerator visible to this process and on the host.

    Returns:
        The bytes of each device, in the order given; for None, accelerators by index, then `"cpu"`.

    Raises:
        DeviceMapError: There is no such kind of device.
        ValueError: `max_memory` is not a mapping, or a size is invalid.

    Example:
        >>> get_max_memory({"cpu": "6MB"})
        {'cpu': 6000000}
    """
    if max_memory is not None:
        if not isinstance(cast("object", max_memory), Mapping):
            raise ValueError(
                f'max_memory={max_memory!r}: give a size for each device, such as {{0: "20GB", "cpu": "60GB"}}'
            )
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


def balanced_budgets(
    budgets: Mapping[Device, int], blocks: Iterable[Block], *, low_zero: bool = False
) -> dict[Device, int]:
    """Return budgets that spread a model evenly over the accelerators; `low_zero` leaves the first the rest."""
    balanced = dict(budgets)
    spread = [device for device in budgets if tier_of(device) is Tier.DEVICE]
    if len(spread) < 2:
        return balanced
    first, *others = spread
    sharing = others if low_zero else spread
    sizes = [block.size_bytes for block in blocks]
    # A block goes to one device as a whole, so each device may exceed its even share by the largest block.
    share = -(-sum(sizes) // len(sharing)) + max(sizes, default=0)
    for device in sharing[:-1]:
        balanced[device] = min(budgets[device], share)
    if low_zero:
        rest = sum(sizes) - sum(balanced[device] for device in others)
        balanced[first] = min(budgets[first], max(0, rest))
    return balanced


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that a device has free for this process now; None if the device does not report them."""
    if device.type == "cpu":  # with the reclaimable page cache
        of_swap = int(psutil.swap_memory().free) if available_host_bytes() is None else 0
        return free_of_host() + of_swap
    try:
        return _free_of(device)
    except ValueError:
        return None


def free_of_host() -> int:
    """Return the bytes of host memory that are free for this process, within the limits of its container."""
    available = int(psutil.virtual_memory().available)
    of_container = available_host_bytes()
    return available if of_container is None else min(available, of_container)


def _free_of(device: torch.device) -> int:
    """Return the bytes that an accelerator has free for this process, including torch's unused cached memory."""
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        raise ValueError(
            f'{device} does not say how much memory is free: give max_memory={{{device.index}: "16GB", ...}}'
        )
    cached = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    return int(module.mem_get_info(device)[0]) + cached
