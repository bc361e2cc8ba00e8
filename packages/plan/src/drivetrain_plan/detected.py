"""The hardware of a run: the devices of its ranks, and the rates that the ranks measure together in two seconds."""

import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import skip_init

from drivetrain_dispatch.planning.bandwidth import default_cache, recalled, remembered
from drivetrain_dispatch.planning.hardware import hardware_of
from drivetrain_dispatch.planning.memory_budget import free_bytes
from drivetrain_plan.hardware import Collective, RunHardware, published_rates
from drivetrain_plan.program.tally import StepTally
from drivetrain_state import Context
from drivetrain_state.collectives.collective_errors import on_all_ranks, on_main
from drivetrain_state.rank_group import RankGroup

_SECONDS = 0.3  # for each rate
# Of the matrices that are multiplied: the larger ones where the others are soon done.
_WIDTH, _MOST_WIDTH, _SOON = 512, 4096, 1e-3
_WAITS = 21  # of ranks for each other
_COPIED_BYTES, _SENT_BYTES, _NUM_LAYERS = 64 * 2**20, 8 * 2**20, 20
# The fields of `RunHardware` that are measured, and kinds of collectives; those of links need several ranks.
_OF_DEVICE = ("flops", "fp32_flops", "memory_rate", "operation_seconds")
_OF_LINKS = ("peer_rate", "latency_seconds", "all_gather", "reduce_scatter")
_SLOWEST_IS_MOST = ("operation_seconds", "latency_seconds")
# Of the rate of a large product: layers are smaller, of other shapes, and find what they read less often in a cache.
# So chosen that the steps of benchmarks/plan_times.py, on a CPU, are about as long as predicted; no GPU was measured.
_EFFICIENCY = 0.8


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
    kinds: tuple[Collective, ...] = ("all_gather", "reduce_scatter")
    shares = {kind: measured.pop(kind) / measured["peer_rate"] for kind in kinds if kind in measured}
    if topology.num_nodes > 1 and "peer_rate" in measured:  # what all ranks reach together is the network's
        measured["network_rate"] = measured.pop("peer_rate")
    return replace(
        found, **measured, shares=shares, efficiency=_EFFICIENCY, link_efficiency=1, basis="measured"
    )


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
        f"{context.topology.num_nodes} x {context.topology.local_world_size}, {group.size}",
        dist.get_backend(group.process_group) if group.size > 1 else "",
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
    slowest = {
        field: (max if field in _SLOWEST_IS_MOST else min)(one[field] for one in each) for field in wanted
    }

    def keep() -> None:
        for field, key in keys.items():
            remembered(cache, key, lambda rate=slowest[field]: rate)

    on_main(context, keep, doing="keeping the measured rates")
    return slowest


def _measure(context: Context) -> dict[str, float]:
    """Measure rates, each at the same time on all ranks, which may share cores and memory. Called on all ranks."""
    device, group = context.device, context.ranks("counts")
    found: dict[str, float] = {}
    for field, dtype in (("flops", torch.bfloat16), ("fp32_flops", torch.float32)):
        taken, width = _product(device, group, dtype, _WIDTH), _WIDTH
        if _least(group, taken) < _SOON:
            taken, width = _product(device, group, dtype, _MOST_WIDTH), _MOST_WIDTH
        found[field] = 2 * width**3 / taken
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found["memory_rate"] = 2 * _COPIED_BYTES / _seconds(device, group, lambda: target.copy_(source))
    # Not initialised, which would draw from the loop's own generator.
    layers = nn.Sequential(*(skip_init(nn.Linear, 1, 1, device=device) for _ in range(_NUM_LAYERS)))
    for parameter in layers.parameters():
        nn.init.ones_(parameter)
    one = torch.ones(1, 1, device=device)
    with StepTally() as tally:
        layers(one).backward()
    taken = _seconds(device, group, lambda: layers(one).backward())
    found["operation_seconds"] = taken / tally.num_operations
    if group.size > 1:
        found |= _measure_links(device, group)
    return found


def _least(group: RankGroup, value: float) -> float:
    """Return the least of a number of each rank. Called on all ranks."""
    if group.size == 1:
        return value
    values: list[Any] = [None] * group.size
    dist.all_gather_object(values, value, group=group.process_group)
    return min(values)


def _measure_links(device: torch.device, group: RankGroup) -> dict[str, float]:
    """Measure collectives: each rank sends n - 1 of n parts, an all-reduce twice."""
    whole, pg = torch.zeros(_SENT_BYTES // 4 // group.size * group.size, device=device), group.process_group
    part = whole.new_zeros(len(whole) // group.size)
    sent = (group.size - 1) / group.size * whole.nbytes
    works: Mapping[str, tuple[Callable[[], object], float]] = {
        "peer_rate": (lambda: dist.all_reduce(whole, group=pg), 2 * sent),
        "all_gather": (lambda: dist.all_gather_into_tensor(whole, part, group=pg), sent),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(part, whole, group=pg), sent),
    }
    found = {name: sent / _seconds(device, group, work, repeats=6) for name, (work, sent) in works.items()}
    return found | {"latency_seconds": _wait(device, pg) / (group.size - 1).bit_length()}


def _wait(device: torch.device, group: dist.ProcessGroup | None) -> float:
    """Return the mean time of an exchange of nothing after a product, with the wait for ranks that end later."""
    one, least = torch.ones(_WIDTH, _WIDTH, device=device), torch.zeros(1, device=device)
    taken: list[float] = []
    for _ in range(_WAITS):
        torch.mm(one, one)
        _synchronize(device)
        begun = time.perf_counter()
        dist.all_reduce(least, group=group)
        _synchronize(device)
        taken.append(time.perf_counter() - begun)
    return fmean(taken[1:])


def _product(device: torch.device, group: RankGroup, dtype: torch.dtype, width: int) -> float:
    one, other = (torch.ones(width, width, dtype=dtype, device=device) for _ in range(2))
    return _seconds(device, group, lambda: one @ other)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _seconds(
    device: torch.device, group: RankGroup, work: Callable[[], object], *, repeats: int | None = None
) -> float:
    """Return the mean time of some work that all ranks repeat as often, until the last of them is done.

    In a step, too, ranks that share cores wait for the one that got them last. Called on all ranks.
    """
    begun = 0.0
    for _ in range(2):  # the first warms up
        begun = time.perf_counter()
        work()
        _synchronize(device)
    once = _least(group, max(time.perf_counter() - begun, 1e-9))
    number = repeats or max(3, ceil(_SECONDS / once))
    begun = _meet(group)
    for _ in range(number):
        work()
        _synchronize(device)
    return max((_meet(group) - begun) / number, 1e-9)


def _meet(group: RankGroup) -> float:
    """Return the time at which all ranks are here."""
    if group.size > 1:
        dist.barrier(group.process_group)
    return time.perf_counter()
