"""Placements to begin a plan with: as much as fits stays, the rest is spread evenly over the forward. Pure."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from drivetrain_dispatch.planning.block_groups import Groups
from drivetrain_dispatch.planning.pipeline_model import Source

_FEW = 8  # sizes of groups
_MANY = 2_000  # groups: fewer ways are tried, each of which takes its time


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """What may be held where, in bytes.

    Attributes:
        devices: Each device that computes, in the order of the forward.
        host: The host's memory, for what is offloaded; with none of `devices` it computes itself.
        disk: The disk; None for as much as there is.
        in_place: Whether weights of the disk are used where they are, as the host does: they take no window.
    """

    devices: tuple[int, ...]
    host: int
    disk: int | None = None
    in_place: bool = False


class Placed(NamedTuple):
    """Of each group, where it is and the device that computes it."""

    sources: list[Source]
    devices: list[int]


class Way(NamedTuple):
    """A way to offload.

    Attributes:
        window_bytes: What each device keeps free for weights that come.
        largest: No larger group is offloaded.
        due: How much of a group must be owed before one is offloaded: half of one spreads evenly, a whole one keeps
            the first on the device.
        shifts: How many groups further each device's part begins than its budget's share of the bytes has it.
    """

    window_bytes: int
    largest: int
    due: float = 0.5
    shifts: tuple[int, ...] = ()


def all_stay(groups: Groups, budgets: Sequence[int]) -> Placed | None:
    """Everything on the devices, filled in their order; None if it does not fit so."""
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
    return Placed(["device"] * len(devices), devices)


def ways_of(groups: Groups, budgets: Budgets) -> list[Way]:
    """The ways that are tried, the smallest windows first.

    Windows: of the largest unit alone, of a whole group, of several. What is offloaded may be as large as the largest
    group; or as most are, the few larger ones having to stay. Of a model of few sizes, as each of them.
    """
    ordered = sorted(groups.sizes)
    ways: list[Way] = []
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
        ways += [Way(window, largest) for window in sorted(windows)]
    return ways


def some_come(groups: Groups, budgets: Budgets, way: Way) -> Placed | None:
    """As much as fits on the devices, the rest spread evenly over the forward; None if it does not fit."""
    devices = list(budgets.devices)
    while any(devices):
        placed = Placed([], [])
        for at, segment in enumerate(_segments(groups, devices, way.shifts)):
            room = devices[at] - groups.fixed_bytes(segment)
            sources = _spread(groups, segment, room, way, first_stays="device" in placed.sources)
            if sources is None:
                if not devices[at]:
                    return None  # its part begins where it was shifted to
                devices[at] = 0  # too small for its part: the others compute that
                break
            placed.sources.extend(sources)
            placed.devices.extend([at] * len(sources))
        else:
            return placed if to_disk(groups.sizes, placed.sources, budgets, way.due) else None
    return None


def shifted(way: Way, num_devices: int, most: int) -> list[Way]:
    """The same way with one device's part beginning earlier or later, by a few groups."""
    return [
        way._replace(shifts=tuple(shift if at == device else 0 for at in range(num_devices)))
        for device in range(1, num_devices)
        for shift in (*range(-most, 0), *range(1, most + 1))
    ]


def _segments(groups: Groups, budgets: Sequence[int], shifts: Sequence[int] = ()) -> list[range]:
    """The groups that each device computes: one after the other, by bytes in the proportion of the budgets."""
    passed, whole = list(accumulate(groups.sizes)), sum(budgets)
    total = passed[-1] if passed else 0
    # In integers: shares as floats may miss the last group.
    ends = [bisect_right(passed, total * end // whole) if end else 0 for end in accumulate(budgets)]
    for at, shift in enumerate(shifts[1:]):
        least, most = ends[at - 1] if at else 0, ends[at + 1]
        ends[at] = min(max(ends[at] + shift, least), most)
    return [range(start, end) for start, end in pairwise([0, *ends])]


def _spread(groups: Groups, segment: range, room: int, way: Way, *, first_stays: bool) -> list[Source] | None:
    """What of a device's groups stays, and what comes from the host, evenly between; None if the room is too small.

    Args:
        groups: All of them.
        segment: Those that the device computes.
        room: Bytes for weights, those that stay and those that come.
        way: How to offload.
        first_stays: Whether the first one has to stay: a map says by it which device computes those behind it.
    """
    sizes = groups.sizes[segment.start : segment.stop]
    sources: list[Source] = []
    if sum(sizes) <= room:
        sources.extend("device" for _ in sizes)
        return sources
    fixed = sum([size_bytes for size_bytes in sizes if size_bytes > way.largest])
    free = sum(sizes) - fixed
    room -= fixed + way.window_bytes
    if room < 0:
        return None
    coming = 1 - min(1, room / free) if free else 0.0
    owed = 0.0
    if first_stays and sizes[0] <= way.largest:
        if sizes[0] > room:
            return None
        room -= sizes[0]
        sources.append("device")
    for size_bytes in sizes[len(sources) :]:
        if size_bytes > way.largest:
            sources.append("device")
            continue
        owed += size_bytes * coming
        if size_bytes <= room and owed < way.due * (size_bytes or 1):
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


def to_disk(sizes: Sequence[int], sources: list[Source], budgets: Budgets, due: float) -> bool:
    """Send to the disk what the host cannot hold, evenly spread; whether the disk can hold it."""
    coming = [index for index, source in enumerate(sources) if source == "host"]
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
        sources[index] = "disk"
        disk += size_bytes
    return budgets.disk is None or disk <= budgets.disk
