"""Which block of a model stays on a device and which comes when it is needed: the plan of a device map. Pure."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from drivetrain_dispatch.blocks import Block
from drivetrain_dispatch.errors import DeviceMapError
from drivetrain_dispatch.timeline import Rates, Source, Turn, Work, play, seconds_of

_DEPTHS = (4, 2, 1, 0)  # offloaded blocks on their way; room for each is taken from what could stay


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
        turns: The predicted time line.
    """

    sources: tuple[Source, ...]
    devices: tuple[int, ...]
    depth: int
    turns: tuple[Turn, ...]

    @property
    def seconds(self) -> float:
        """The predicted time of a forward."""
        return seconds_of(self.turns)


def plan_places(
    blocks: Sequence[Block], costs: Mapping[str, Cost], budgets: Budgets, rates: Rates
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
        rates: How fast weights come.

    Raises:
        DeviceMapError: The budgets cannot hold the model, or not its largest block; the message says what would do.
    """
    groups = _groups_of(blocks, costs)
    placed = _all_stay(groups, budgets.devices)
    if placed is not None:
        return _plan(blocks, costs, groups, placed, rates, depth=0)
    ways = [_Way(depth, largest) for largest in _limits(groups) for depth in _DEPTHS]
    found = [
        (_plan(blocks, costs, groups, placed, rates, depth=way.depth), way)
        for way in ways
        if (placed := _some_come(groups, budgets, way)) is not None
    ]
    if not found:
        raise DeviceMapError(_why_not(groups, budgets))
    best, way = min(found, key=lambda pair: (pair[0].seconds, pair[0].depth))
    if (placed := _some_come(groups, budgets, way._replace(first_stay=True))) is None:
        return best
    other = _plan(blocks, costs, groups, placed, rates, depth=way.depth)
    return other if other.seconds < best.seconds else best


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Blocks that share tensors, or one block.

    Attributes:
        name: The first block's.
        members: Their indices.
        size_bytes: Of all their tensors, each once.
        cost: Of all of them.
    """

    name: str
    members: tuple[int, ...]
    size_bytes: int
    cost: Cost


# Of each group, where it is and the device that computes it.
_Placed = list[tuple[Source, int]]


def _groups_of(blocks: Sequence[Block], costs: Mapping[str, Cost]) -> list[_Group]:
    members: dict[int, list[int]] = {}
    for index, block in enumerate(blocks):
        members.setdefault(block.group, []).append(index)
    nothing = Cost()
    groups: list[_Group] = []
    for indices in members.values():
        each = [costs.get(blocks[index].name, nothing) for index in indices]
        groups.append(
            _Group(
                name=blocks[indices[0]].name,
                members=tuple(indices),
                size_bytes=sum(blocks[index].size_bytes for index in indices),
                cost=Cost(
                    peak_bytes=max(cost.peak_bytes for cost in each),
                    kept_bytes=sum(cost.kept_bytes for cost in each),
                ),
            )
        )
    return groups


def _all_stay(groups: Sequence[_Group], budgets: Sequence[int]) -> _Placed | None:
    """Everything on the devices, filled in their order; None if it does not fit so."""
    placed: _Placed = []
    at = held = peak = 0
    for group in groups:
        while True:
            peak = max(peak, group.cost.peak_bytes)
            if held + group.size_bytes + group.cost.kept_bytes + peak <= budgets[at]:
                break
            at, held, peak = at + 1, 0, 0
            if at == len(budgets):
                return None
        held += group.size_bytes + group.cost.kept_bytes
        placed.append(("device", at))
    return placed


def _limits(groups: Sequence[_Group]) -> list[int]:
    """How large an offloaded group may be: as the largest; or as most are, the few larger ones having to stay."""
    sizes = sorted(group.size_bytes for group in groups)
    return sorted({sizes[-1], sizes[len(sizes) * 9 // 10]})


def _some_come(groups: Sequence[_Group], budgets: Budgets, way: _Way) -> _Placed | None:
    """As much as fits on the devices, the rest spread evenly over the forward; None if it does not fit."""
    devices = list(budgets.devices)
    while any(devices):
        placed: _Placed = []
        for at, segment in enumerate(_segments(groups, devices)):
            peak = max((group.cost.peak_bytes for group in segment), default=0)
            kept = sum(group.cost.kept_bytes for group in segment)
            sources = _spread(segment, devices[at] - peak - kept - (way.depth + 1) * way.largest, way)
            if sources is None:
                devices[at] = 0  # too small for its part: the others compute that
                break
            placed.extend((source, at) for source in sources)
        else:
            return _to_disk(groups, placed, budgets, way)
    return None


def _segments(groups: Sequence[_Group], budgets: Sequence[int]) -> list[Sequence[_Group]]:
    """The groups that each device computes: one after the other, by bytes in the proportion of the budgets."""
    total, whole = sum(group.size_bytes for group in groups), sum(budgets)
    passed = list(accumulate(group.size_bytes for group in groups))
    # In integers: shares as floats may miss the last group.
    ends = [bisect_right(passed, total * end // whole) if end else 0 for end in accumulate(budgets)]
    return [groups[start:end] for start, end in pairwise([0, *ends])]


def _spread(segment: Sequence[_Group], room: int, way: _Way) -> list[Source] | None:
    """What of a device's groups stays, and what comes from the host, evenly between; None if the room is too small.

    Args:
        segment: What the device computes.
        room: Bytes for what stays.
        way: How to offload.
    """
    if not segment:
        return []
    due = 1.0 if way.first_stay else 0.5
    fixed = sum(group.size_bytes for group in segment if group.size_bytes > way.largest)
    free = sum(group.size_bytes for group in segment) - fixed
    room -= fixed
    if room < 0:
        return None
    coming = 1 - min(1, room / free) if free else 0.0
    sources: list[Source] = []
    owed = 0.0
    for group in segment:
        if group.size_bytes > way.largest:
            sources.append("device")
            continue
        owed += group.size_bytes * coming
        if group.size_bytes <= room and owed < due * max(1, group.size_bytes):
            room -= group.size_bytes
            sources.append("device")
        else:
            owed -= group.size_bytes
            sources.append("host")
    for index, group in enumerate(segment):  # what there is room for after all
        if sources[index] == "host" and group.size_bytes <= room:
            room -= group.size_bytes
            sources[index] = "device"
    return sources


def _to_disk(groups: Sequence[_Group], placed: _Placed, budgets: Budgets, way: _Way) -> _Placed | None:
    """Send to the disk what the host cannot hold, evenly spread; None if the disk cannot hold it either."""
    coming = sum(groups[index].size_bytes for index, (source, _) in enumerate(placed) if source == "host")
    share = max(0, coming - budgets.host) / coming if coming else 0.0
    host, disk, owed = budgets.host, budgets.disk, 0.0
    due = 1.0 if way.first_stay else 0.5
    for index, (source, at) in enumerate(placed):
        if source != "host":
            continue
        size_bytes = groups[index].size_bytes
        owed += size_bytes * share
        if size_bytes <= host and owed < due * max(1, size_bytes):
            host -= size_bytes
            continue
        owed -= size_bytes
        placed[index] = ("disk", at)
        if disk is not None:
            disk -= size_bytes
            if disk < 0:
                return None
    return placed


def _plan(
    blocks: Sequence[Block],
    costs: Mapping[str, Cost],
    groups: Sequence[_Group],
    placed: _Placed,
    rates: Rates,
    *,
    depth: int,
) -> PlacePlan:
    """A plan with its time line."""
    sources: list[Source] = ["device"] * len(blocks)
    devices = [0] * len(blocks)
    for group, (source, at) in zip(groups, placed, strict=True):
        for index in group.members:
            sources[index], devices[index] = source, at
    nothing = Cost()
    works = [
        Work(costs.get(block.name, nothing).seconds, block.size_bytes, source)
        for block, source in zip(blocks, sources, strict=True)
    ]
    return PlacePlan(
        sources=tuple(sources),
        devices=tuple(devices),
        depth=depth,
        turns=tuple(play(works, rates, depth=depth)),
    )


def _why_not(groups: Sequence[_Group], budgets: Budgets) -> str:
    """What is missing."""
    total = sum(group.size_bytes for group in groups)
    held = sum(budgets.devices) + budgets.host + (budgets.disk or 0)
    if budgets.disk is not None and held < total:
        return (
            f"max_memory: the model takes {_shown(total)} and the devices may hold {_shown(held)} together: give "
            "them more, or leave the disk's budget out"
        )
    group = max(groups, key=lambda group: group.size_bytes)
    peak = max(group.cost.peak_bytes for group in groups)
    kept = sum(group.cost.kept_bytes for group in groups)
    return (
        f"max_memory: {group.name!r} takes {_shown(group.size_bytes)}, activations up to {_shown(peak)}, "
        f"{_shown(kept)} stay for the whole model, and no device may hold more than {_shown(max(budgets.devices))}: "
        f"give one at least {_shown(group.size_bytes + peak + kept)}, or let the block be split"
    )


def _shown(size_bytes: int) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= size:
            return f"{size_bytes / size:.2f} {unit}"
    return f"{size_bytes} B"
