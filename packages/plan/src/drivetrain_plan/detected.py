"""The hardware of a run: the devices of its ranks, and the rates that the ranks measure together in two seconds."""

import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from drivetrain_dispatch.planning.bandwidth import default_cache, recalled, remembered
from drivetrain_dispatch.planning.hardware import hardware_of
from drivetrain_dispatch.planning.memory_budget import free_bytes
from drivetrain_plan.hardware import RunHardware, published_rates
from drivetrain_state import Context
from drivetrain_state.collectives.collective_errors import on_all_ranks, on_main

_SECONDS = 0.3  # for each rate
_WIDTH, _MOST_WIDTH = (
    512,
    4096,
)  # of the matrices that are multiplied: the larger ones where the others are soon done
_SOON = 1e-3
_COPIED_BYTES, _SENT_BYTES = 64 * 2**20, 16 * 2**20
# The fields of `RunHardware` that are measured; those of links need several ranks.
_OF_DEVICE, _OF_LINKS = ("flops", "fp32_flops", "memory_rate"), ("peer_rate", "latency_seconds")


def measure_hardware(context: Context, *, held_bytes: int = 0, cache: Path | None = None) -> RunHardware:
    """Return the devices of a run, and their rates. Called on all ranks.

    Ranks measure at the same time, for those of a host may share its cores and links. Later runs of as many ranks on
    the host read the cache.

    Args:
        context: The ranks and the device of this process.
        held_bytes: The bytes of this process on the device that a step will use too, such as the model's weights.
        cache: The file of measured rates; by default this user's.

    Raises:
        ValueError: The device does not say how much memory is free.
    """
    device, topology = context.device, context.topology
    name = device.type
    if device.type != "cpu" and hasattr(module := torch.get_device_module(device), "get_device_name"):
        name = str(module.get_device_name(device))
    try:
        rates = hardware_of(name)
    except ValueError:  # a device of a kind that is not in the table, whose rates are measured
        rates = hardware_of("cuda")
    free = on_all_ranks(
        context, lambda: _free(device, topology.local_world_size), doing="reading the free memory"
    )
    sizes = [min(free) + held_bytes] * topology.local_world_size
    found = published_rates(name, rates, topology.num_nodes, sizes)
    measured = _rates(context, name, cache or default_cache())
    if topology.num_nodes > 1 and "peer_rate" in measured:  # what all ranks reach together is the network's
        measured["network_rate"] = measured.pop("peer_rate")
    return replace(found, **measured, efficiency=1, link_efficiency=1, basis="measured")


def _free(device: torch.device, num_sharing: int) -> int:
    found = free_bytes(device)
    if found is None:
        raise ValueError(f"{device} does not say how much memory is free: name a backend instead of 'auto'")
    return found // num_sharing if device.type == "cpu" else found


def _rates(context: Context, name: str, cache: Path) -> dict[str, float]:
    """Return the measured rates by field; those of the slowest rank."""
    group = context.ranks("counts")
    wanted = _OF_DEVICE + (_OF_LINKS if group.size > 1 else ())
    of_run = (
        platform.node(),
        name,
        str(context.topology.world_size),
        str(torch.get_num_threads()),
        torch.__version__,
    )
    keys = {field: ("training", field, *of_run) for field in wanted}

    def known() -> dict[str, float]:
        return {field: rate for field, key in keys.items() if (rate := recalled(cache, key)) is not None}

    found = on_main(context, known, doing="reading the measured rates")
    if len(found) == len(wanted):
        return found
    each = on_all_ranks(context, lambda: _measure(context), doing="measuring rates")
    slowest = {field: min(one[field] for one in each) for field in wanted}
    if "latency_seconds" in slowest:
        slowest["latency_seconds"] = max(one["latency_seconds"] for one in each)

    def keep() -> None:
        for field, key in keys.items():
            remembered(cache, key, lambda rate=slowest[field]: rate)

    on_main(context, keep, doing="keeping the measured rates")
    return slowest


def _measure(context: Context) -> dict[str, float]:
    """Measure the rates of this rank, together with the others."""
    device, group = context.device, context.ranks("counts")
    found: dict[str, float] = {}
    for field, dtype in (("flops", torch.bfloat16), ("fp32_flops", torch.float32)):
        taken, width = _product(device, dtype, _WIDTH), _WIDTH
        if taken < _SOON:
            taken, width = _product(device, dtype, _MOST_WIDTH), _MOST_WIDTH
        found[field] = 2 * width**3 / taken
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found["memory_rate"] = 2 * _COPIED_BYTES / _seconds(device, lambda: target.copy_(source))
    if group.size > 1:
        # Each rank sends and receives n - 1 of n parts, twice.
        found["latency_seconds"] = (
            _seconds(device, _all_reduce(context, 1), repeats=5) / (group.size - 1).bit_length()
        )
        sent = 2 * (group.size - 1) / group.size * _SENT_BYTES
        found["peer_rate"] = sent / _seconds(device, _all_reduce(context, _SENT_BYTES // 4), repeats=5)
    return found


def _product(device: torch.device, dtype: torch.dtype, width: int) -> float:
    one, other = (torch.ones(width, width, dtype=dtype, device=device) for _ in range(2))
    return _seconds(device, lambda: one @ other)


def _all_reduce(context: Context, length: int) -> Callable[[], object]:
    values = torch.zeros(length, device=context.device)
    return lambda: dist.all_reduce(values, group=context.ranks("counts").process_group)


def _seconds(device: torch.device, work: Callable[[], object], *, repeats: int | None = None) -> float:
    """Return the least time of some work, which is done at least twice; collectives `repeats` times on all ranks."""
    taken: list[float] = []
    begun = time.perf_counter()
    while len(taken) < (repeats or 2) or (repeats is None and time.perf_counter() - begun < _SECONDS):
        start = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        taken.append(time.perf_counter() - start)
    return max(min(taken[1:]), 1e-9)  # the first warms up
