"""Which block of a model stays on a device and which comes when it is needed: the plan of a device map. Pure."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple, TypeVar

from drivetrain_dispatch.blocks import Block
from drivetrain_dispatch.errors import DeviceMapError
from drivetrain_dispatch.timeline import Rates, Source, forward_seconds

_DEPTHS = (4, 2, 1, 0)  # offloaded blocks on their way; room for each is taken from what could stay
_UNUSED = Rates(to_device=inf, from_disk=inf)  # of a forward to which nothing comes
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a block does in one forward.

    Attributes:
        seconds: It computes for so long, its weights being there.
        peak_bytes: Activations at their peak.
        kept_bytes: What stays on the device afterwards, such as keys and values.
    """

    seconds: float = 0.0
    peak_bytes: int = 0
    kept_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """What may be held where, in bytes.

    Attributes:
        devices: Each device that computes, in the order of the forward.
        host: The host's memory, for what is offloaded; with none of `devices` it computes itself.
        disk: The disk; None for as much as there is.
    """

    devices: tuple[int, ...]
    host: int
    disk: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacePlan:
    """Where each block is and where it computes.

    Attributes:
        sources: Where each block's weights are when it is not its turn.
        devices: The device that computes each, by its index in `Budgets.devices`.
        depth: How many offloaded blocks may be on their way beside the one that computes.
        seconds: The predicted time of a forward.
    """

    sources: tuple[Source, ...]
    devices: tuple[int, ...]
    depth: int
    seconds: float


def plan_places(
    blocks: Sequence[Block],
    costs: Mapping[str, Cost],
    budgets: Budgets,
    rates: Rates | Callable[[], Rates],
) -> PlacePlan:
    """Plan where the blocks of a model are, within every budget at its peak.

    If everything can stay, the devices are filled in their order, so that activations go from one to the next seldom.
    Otherwise as much as possible stays, and what does not is spread evenly between: the weights of one block come
    while those before it compute. Of several numbers of blocks on their way, the one with the shortest predicted
    forward is taken. A device that has no room for a block on its way computes nothing.

    Args:
        blocks: In the order of the forward. Those of a group stay together.
        costs: What each block does, by its name; one that is missing does nothing.
        budgets: What may be held where.
        rates: How fast weights come. A function is called only if some have to.

    Raises:
        DeviceMapError: The budgets cannot hold the model, or not its largest block; the message says what would do.
    """
    groups = _groups_of(blocks, _costs_of(blocks, costs))
    if (placed := _all_stay(groups, budgets.devices)) is not None:
        return _plan(blocks, costs, groups, placed, _UNUSED, depth=0)
    rates = rates() if callable(rates) else rates
    ways = [_Way(depth, largest) for largest in _limits(groups) for depth in _DEPTHS]
    found = [
        (_plan(blocks, costs, groups, placed, rates, depth=way.depth), way)
        for way in ways
        if (placed := _some_come(groups, budgets, way)) is not None
    ]
    if not found:
        raise DeviceMapError(_why_not(blocks, groups, budgets))
    best, way = min(found, key=lambda pair: (pair[0].seconds, pair[0].depth))
    if (placed := _some_come(groups, budgets, way._replace(first_stay=True))) is None:
        return best
    other = _plan(blocks, costs, groups, placed, rates, depth=way.depth)
    return other if other.seconds < best.seconds else best


def predicted_seconds(
    plan: PlacePlan, blocks: Sequence[Block], costs: Mapping[str, Cost], rates: Rates
) -> float:
    """The predicted time of a forward under a plan, be it another forward than the one it was made for.

    Args:
        plan: Where the blocks are.
        blocks: In the order of the forward.
        costs: What each does in this forward, by its name.
        rates: How fast weights come.
    """
    seconds = [cost.seconds for cost in _costs_of(blocks, costs)]
    sizes = [block.size_bytes for block in blocks]
    return forward_seconds(zip(seconds, sizes, plan.sources, strict=True), rates, depth=plan.depth)


def _costs_of(blocks: Sequence[Block], costs: Mapping[str, Cost]) -> list[Cost]:
    nothing = Cost()
    return [costs.get(block.name, nothing) for block in blocks] if costs else [nothing] * len(blocks)


class _Way(NamedTuple):
    """A way to offload.

    Attributes:
        depth: How many offloaded groups may be on their way: each device keeps room for one more.
        largest: No larger group is offloaded.
        first_stay: Whether a group is offloaded only when a whole one is due, not from half of one on.
    """

    depth: int
    largest: int
    first_stay: bool = False


class _Groups(NamedTuple):
    """Blocks that share tensors, placed as one, and those that do not: a list for each thing said of them.

    Attributes:
        firsts: The index of the first block.
        sizes: Bytes of all tensors, each once.
        peaks: Activations at the peak of any of the blocks.
        kept: What all of the blocks leave on the device.
        of_blocks: The index of each block's group; None where each block is one itself.
    """

    firsts: list[int]
    sizes: list[int]
    peaks: list[int]
    kept: list[int]
    of_blocks: list[int] | None

    def by_block(self, values: list[_Value]) -> list[_Value]:
        """What is said of groups, for each block."""
        return values if self.of_blocks is None else [values[index] for index in self.of_blocks]


class _Placed(NamedTuple):
    """Of each group, where it is and the device that computes it."""

    sources: list[Source]
    devices: list[int]


def _groups_of(blocks: Sequence[Block], costs: Sequence[Cost]) -> _Groups:
    # No object for each: there may be 100,000 of them.
    groups = _Groups(
        list(range(len(blocks))),
        [block.size_bytes for block in blocks],
        [cost.peak_bytes for cost in costs],
        [cost.kept_bytes for cost in costs],
        None,
    )
    firsts = [index for index, block in enumerate(blocks) if block.group == index]
    if len(firsts) == len(blocks):
        return groups
    numbers = {first: number for number, first in enumerate(firsts)}
    zeros = [0] * len(firsts)
    of_blocks = [numbers[block.group] for block in blocks]
    joined = _Groups(firsts, zeros.copy(), zeros.copy(), zeros.copy(), of_blocks)
    for index, number in enumerate(of_blocks):
        joined.sizes[number] += groups.sizes[index]
        joined.peaks[number] = max(joined.peaks[number], groups.peaks[index])
        joined.kept[number] += groups.kept[index]
    return joined


def _all_stay(groups: _Groups, budgets: Sequence[int]) -> _Placed | None:
    """Everything on the devices, filled in their order; None if it does not fit so."""
    devices: list[int] = []
    at = held = peak = 0
    for size_bytes, peak_bytes, kept_bytes in zip(groups.sizes, groups.peaks, groups.kept, strict=True):
        while True:
            peak = max(peak, peak_bytes)
            if held + size_bytes + kept_bytes + peak <= budgets[at]:
                break
            at, held, peak = at + 1, 0, 0
            if at == len(budgets):
                return None
        held += size_bytes + kept_bytes
        devices.append(at)
    return _Placed(["device"] * len(devices), devices)


def _limits(groups: _Groups) -> list[int]:
    """How large an offloaded group may be: as the largest; or as most are, the few larger ones having to stay."""
    sizes = sorted(groups.sizes)
    return sorted({sizes[-1], sizes[len(sizes) * 9 // 10]})


def _some_come(groups: _Groups, budgets: Budgets, way: _Way) -> _Placed | None:
    """As much as fits on the devices, the rest spread evenly over the forward; None if it does not fit."""
    devices = list(budgets.devices)
    while any(devices):
        placed = _Placed([], [])
        for at, segment in enumerate(_segments(groups.sizes, devices)):
            room = devices[at] - max(groups.peaks[segment], default=0) - sum(groups.kept[segment])
            sources = _spread(groups.sizes[segment], room - (way.depth + 1) * way.largest, way)
            if sources is None:
                devices[at] = 0  # too small for its part: the others compute that
                break
            placed.sources.extend(sources)
            placed.devices.extend([at] * len(sources))
        else:
            return placed if _to_disk(groups.sizes, placed.sources, budgets, way) else None
    return None


def _segments(sizes: Sequence[int], budgets: Sequence[int]) -> list[slice]:
    """The groups that each device computes: one after the other, by bytes in the proportion of the budgets."""
    passed, whole = list(accumulate(sizes)), sum(budgets)
    total = passed[-1] if passed else 0
    # In integers: shares as floats may miss the last group.
    ends = [bisect_right(passed, total * end // whole) if end else 0 for end in accumulate(budgets)]
    return [slice(start, end) for start, end in pairwise([0, *ends])]


def _spread(sizes: Sequence[int], room: int, way: _Way) -> list[Source] | None:
    """What of a device's groups stays, and what comes from the host, evenly between; None if the room is too small.

    Args:
        sizes: Of the groups that the device computes.
        room: Bytes for what stays.
        way: How to offload.
    """
    if not sizes:
        return []
    due = 1.0 if way.first_stay else 0.5
    fixed = sum([size_bytes for size_bytes in sizes if size_bytes > way.largest])
    free = sum(sizes) - fixed
    room -= fixed
    if room < 0:
        return None
    coming = 1 - min(1, room / free) if free else 0.0
    sources: list[Source] = []
    owed = 0.0
    for size_bytes in sizes:
        if size_bytes > way.largest:
            sources.append("device")
            continue
        owed += size_bytes * coming
        if size_bytes <= room and owed < due * (size_bytes or 1):
            room -= size_bytes
            sources.append("device")
        else:
            owed -= size_bytes
            sources.append("host")
    for index, size_bytes in enumerate(sizes):  # what there is room for after all
        if size_bytes <= room and sources[index] == "host":
            room -= size_bytes
            sources[index] = "device"
    return sources


def _to_disk(sizes: Sequence[int], sources: list[Source], budgets: Budgets, way: _Way) -> bool:
    """Send to the disk what the host cannot hold, evenly spread; whether the disk can hold it."""
    coming = [index for index, source in enumerate(sources) if source == "host"]
    total = sum([sizes[index] for index in coming])
    if total <= budgets.host:
        return True
    share = (total - budgets.host) / total
    host, disk, owed = budgets.host, 0, 0.0
    due = 1.0 if way.first_stay else 0.5
    for index in coming:
        size_bytes = sizes[index]
        owed += size_bytes * share
        if size_bytes <= host and owed < due * (size_bytes or 1):
            host -= size_bytes
            continue
        owed -= size_bytes
        sources[index] = "disk"
        disk += size_bytes
    return budgets.disk is None or disk <= budgets.disk


def _plan(
    blocks: Sequence[Block],
    costs: Mapping[str, Cost],
    groups: _Groups,
    placed: _Placed,
    rates: Rates,
    *,
    depth: int,
) -> PlacePlan:
    """A plan with its time."""
    sources, devices = groups.by_block(placed.sources), groups.by_block(placed.devices)
    plan = PlacePlan(sources=tuple(sources), devices=tuple(devices), depth=depth, seconds=0.0)
    return replace(plan, seconds=predicted_seconds(plan, blocks, costs, rates))


def _why_not(blocks: Sequence[Block], groups: _Groups, budgets: Budgets) -> str:
    """What is missing."""
    total = sum(groups.sizes)
    held = sum(budgets.devices) + budgets.host + (budgets.disk or 0)
    if budgets.disk is not None and held < total:
        return (
            f"max_memory: the model takes {_shown(total)} and the devices may hold {_shown(held)} together: give "
            "them more, or leave the disk's budget out"
        )
    largest, peak, kept = max(groups.sizes), max(groups.peaks), sum(groups.kept)
    name = blocks[groups.firsts[groups.sizes.index(largest)]].name
    return (
        f"max_memory: {name!r} takes {_shown(largest)}, activations up to {_shown(peak)}, {_shown(kept)} stay for "
        f"the whole model, and no device may hold more than {_shown(max(budgets.devices))}: give "
        f"one at least {_shown(largest + peak + kept)}, or let the block be split"
    )


def _shown(size_bytes: int) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= size:
            return f"{size_bytes / size:.2f} {unit}"
    return f"{size_bytes} B"
