"""The initial placements of a plan: what fits stays, other groups are spread over the forward. Pure."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from drivetrain_dispatch.planning.block_groups import Groups
from drivetrain_dispatch.planning.device_map import Tier

_FEW = 8  # distinct sizes of groups, each of which is tried as the largest offloaded one
_MANY = 2_000  # groups; a larger model tries fewer strategies, to save time


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """The memory budgets of a plan, in bytes."""

    devices: tuple[int, ...]
    host: int  # the bytes of host memory for offloaded weights; 0 if the host itself computes
    disk: int | None = None  # the bytes on disk; None for no limit
    in_place: bool = False  # whether weights on disk are used in place, as the host can: they need no window


class Placed(NamedTuple):
    """The source of each group's weights, and the index of the device that computes the group."""

    sources: list[Tier]
    devices: list[int]


class OffloadStrategy(NamedTuple):
    """A strategy for offloading."""

    window_bytes: int
    largest: int
    # The fraction of a group's bytes that must be owed before the group is offloaded: 0.5 spreads evenly,
    # 1 keeps the first groups on the device.
    due: float = 0.5
    # The number of groups by which each device's segment begins later than its share of the bytes
    # implies.
    shifts: tuple[int, ...] = ()


def all_stay(groups: Groups, budgets: Sequence[int]) -> Placed | None:
    """Return the placement that fills the devices in order and offloads nothing; None if the model does not fit."""
    devices: list[int] = []
    at = held = peak = 0
    for size_bytes, stay_bytes, peak_bytes, kept_bytes in zip(
        groups.sizes, groups.stays, groups.peaks, groups.kept, strict=True
    ):
        while True:
            peak = max(peak, peak_bytes)
            if held + size_bytes + stay_bytes + kept_bytes + peak <= budgets[at]:
                break
            at, held, peak = at + 1, 0, 0
            if at == len(budgets):
                return None
        held += size_bytes + stay_bytes + kept_bytes
        devices.append(at)
    return Placed([Tier.DEVICE] * len(devices), devices)


def strategies_of(groups: Groups, budgets: Budgets) -> list[OffloadStrategy]:
    """Return the strategies to try, from a window of the largest unit to windows of one and several groups."""
    # The largest group that may be offloaded is the largest of all, or that of the smaller nine tenths, so that the
    # few larger ones stay. If the model has few distinct group sizes, each of them is tried.
    ordered = sorted(groups.sizes)
    strategies: list[OffloadStrategy] = []
    sizes = set(ordered)
    many = len(ordered) > _MANY
    if many or len(sizes) > _FEW:
        sizes = {ordered[-1], ordered[len(ordered) * 9 // 10]}
    for largest in sorted(sizes):
        pairs = zip(groups.needs, groups.sizes, strict=True)
        need = max([need for need, size in pairs if size <= largest], default=0)
        windows = (
            {0}
            if budgets.in_place
            else {need, *(max(need, largest * count) for count in ((1, 3) if many else (1, 2, 3, 5)))}
        )
        strategies += [OffloadStrategy(window, largest) for window in sorted(windows)]
    return strategies


def some_come(groups: Groups, budgets: Budgets, strategy: OffloadStrategy) -> Placed | None:
    """Return a placement that keeps what fits on the devices and spreads other groups evenly; None if impossible."""
    devices = list(budgets.devices)
    while any(devices):
        placed = Placed([], [])
        for at, segment in enumerate(_cut_segments(groups, devices, strategy.shifts)):
            room = devices[at] - groups.fixed_bytes(segment)
            sources = _spread(groups, segment, room, strategy, first_stays=Tier.DEVICE in placed.sources)
            if sources is None:
                if not devices[at]:
                    return None  # a shift gave groups to a device without memory
                devices[at] = 0  # too small for its segment: the other devices compute that
                break
            placed.sources.extend(sources)
            placed.devices.extend([at] * len(sources))
        else:
            return placed if to_disk(groups.sizes, placed.sources, budgets, strategy.due) else None
    return None


def shifted(strategy: OffloadStrategy, num_devices: int, most: int) -> list[OffloadStrategy]:
    """Return variants of a strategy in which one device's segment begins earlier or later by a few groups."""
    return [
        strategy._replace(shifts=tuple(shift if at == device else 0 for at in range(num_devices)))
        for device in range(1, num_devices)
        for shift in (*range(-most, 0), *range(1, most + 1))
    ]


def _cut_segments(groups: Groups, budgets: Sequence[int], shifts: Sequence[int] = ()) -> list[range]:
    """Return the consecutive groups that each device computes, with bytes proportional to the budgets."""
    passed, whole = list(accumulate(groups.sizes)), sum(budgets)
    total = passed[-1] if passed else 0
    # In integers: shares as floats may miss the last group.
    ends = [bisect_right(passed, total * end // whole) if end else 0 for end in accumulate(budgets)]
    for at, shift in enumerate(shifts[1:]):
        least, most = ends[at - 1] if at else 0, ends[at + 1]
        ends[at] = min(max(ends[at] + shift, least), most)
    return [range(start, end) for start, end in pairwise([0, *ends])]


def _spread(
    groups: Groups, segment: range, room: int, strategy: OffloadStrategy, *, first_stays: bool
) -> list[Tier] | None:
    """Return the sources of a device's groups, with offloaded groups spread evenly; None if the room is too small."""
    sizes = groups.sizes[segment.start : segment.stop]
    sources: list[Tier] = []
    if sum(sizes) <= room:
        sources.extend(Tier.DEVICE for _ in sizes)
        return sources
    fixed = sum([size_bytes for size_bytes in sizes if size_bytes > strategy.largest])
    free = sum(sizes) - fixed
    room -= fixed + strategy.window_bytes
    if room < 0:
        return None
    coming = 1 - min(1, room / free) if free else 0.0
    owed = 0.0
    # The entry of the first group in the map names the device that computes the groups after it.
    if first_stays and sizes[0] <= strategy.largest:
        if sizes[0] > room:
            return None
        room -= sizes[0]
        sources.append(Tier.DEVICE)
    for size_bytes in sizes[len(sources) :]:
        if size_bytes > strategy.largest:
            sources.append(Tier.DEVICE)
            continue
        owed += size_bytes * coming
        if size_bytes <= room and owed < strategy.due * (size_bytes or 1):
            room -= size_bytes
            sources.append(Tier.DEVICE)
        else:
            owed -= size_bytes
            sources.append(Tier.HOST)
    for index, size_bytes in enumerate(sizes):  # fill the room that is left
        if size_bytes <= room and sources[index] is Tier.HOST:
            room -= size_bytes
            sources[index] = Tier.DEVICE
    return sources


def to_disk(sizes: Sequence[int], sources: list[Tier], budgets: Budgets, due: float) -> bool:
    """Move evenly spread groups that the host cannot hold to the disk, and return whether the disk can hold them."""
    coming = [index for index, source in enumerate(sources) if source is Tier.HOST]
    total = sum([sizes[index] for index in coming])
    if total <= budgets.host:
        return True
    share = (total - budgets.host) / total
    host, disk, owed = budgets.host, 0, 0.0
    for index in coming:
        size_bytes = sizes[index]
        owed += size_bytes * share
        if size_bytes <= host and owed < due * (size_bytes or 1):
            host -= size_bytes
            continue
        owed -= size_bytes
        sources[index] = Tier.DISK
        disk += size_bytes
    return budgets.disk is None or disk <= budgets.disk
