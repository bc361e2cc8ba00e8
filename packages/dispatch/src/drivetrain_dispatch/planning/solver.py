"""Which block of a model stays on a device and which comes when it is needed: the plan of a device map. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from math import inf

from drivetrain_dispatch.errors import DeviceMapError
from drivetrain_dispatch.planning.block_groups import Cost, Forward, Groups, costs_of, groups_of
from drivetrain_dispatch.planning.blocks import Block
from drivetrain_dispatch.planning.initial_placement import (
    Budgets,
    Placed,
    Way,
    all_stay,
    shifted,
    some_come,
    ways_of,
)
from drivetrain_dispatch.planning.local_search import Found, Search
from drivetrain_dispatch.planning.pipeline_model import Rates, Source, forward_seconds

_UNUSED = Rates(to_device=inf, from_disk=inf)  # of a forward to which nothing comes
_NUM_IMPROVED = 8  # placements that better ones are looked for from
_FEW, _SHIFTED = (
    200,
    4,
)  # groups of a model for which other parts of it for each device are tried: how far off


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacePlan:
    """Where each block is and where it computes.

    Attributes:
        sources: Where each block's weights are when it is not its turn.
        devices: The device that computes each, by its index in `Budgets.devices`.
        windows: What each device may hold at once of weights that come, in bytes.
        seconds: The predicted time of a forward.
    """

    sources: tuple[Source, ...]
    devices: tuple[int, ...]
    windows: tuple[int, ...]
    seconds: float


def plan_places(
    blocks: Sequence[Block],
    costs: Mapping[str, Cost],
    budgets: Budgets,
    rates: Rates | Callable[[], Rates],
) -> PlacePlan:
    """Plan where the blocks of a model are, within every budget at its peak.

    If everything can stay, the devices are filled in their order, so that activations go from one to the next seldom.
    Otherwise as much as possible stays, and what does not is spread evenly between: the weights of one unit come
    while those before it compute, as many as find room in the device's window. Several windows are tried, parts
    change places as long as that helps, and the shortest predicted forward is taken; where weights come slower than
    they are used, small windows win, for more stays then. What is left of a budget is the window's too. A device that
    has no room for the largest unit that would come computes nothing.

    Args:
        blocks: In the order of the forward. Those of a group stay together.
        costs: What each block does, by its name; one that is missing does nothing.
        budgets: What may be held where.
        rates: How fast weights come. A function is called only if some have to.

    Raises:
        DeviceMapError: The budgets cannot hold the model, or not its largest unit; the message says what would do.
    """
    each = costs_of(blocks, costs)
    groups, forward = groups_of(blocks, each), Forward(blocks, each)
    if (placed := all_stay(groups, budgets.devices)) is not None:
        found = Search(groups, forward, budgets, _UNUSED).found(placed)
        assert found is not None
        return _plan(groups, found)
    search = Search(groups, forward, budgets, rates() if callable(rates) else rates)
    begun = _begun(search, groups, budgets)
    if not begun:
        raise DeviceMapError(_why_not(blocks, groups, budgets))
    best = nsmallest(_NUM_IMPROVED, begun, key=lambda found: found.rank)
    better = [search.improved(found, share=1 / (len(best) - at)) for at, found in enumerate(best)]
    return _plan(groups, min(better, key=lambda found: found.rank))


def predicted_seconds(
    plan: PlacePlan,
    blocks: Sequence[Block],
    costs: Mapping[str, Cost],
    rates: Rates,
    *,
    in_place: bool = False,
) -> float:
    """The predicted time of a forward under a plan, be it another forward than the one it was made for.

    Args:
        plan: Where the blocks are.
        blocks: In the order of the forward.
        costs: What each does in this forward, by its name.
        rates: How fast weights come.
        in_place: Whether weights of the disk are used where they are.
    """
    works = Forward(blocks, costs_of(blocks, costs)).works(plan.sources, plan.devices)
    if in_place:
        rates = Rates(to_device=inf, from_disk=rates.from_disk)
    return forward_seconds(works, rates, windows=[inf] * len(plan.windows) if in_place else plan.windows)


def _begun(search: Search, groups: Groups, budgets: Budgets) -> list[Found]:
    """Placements to begin with, each another one: of every way, and of the best one with the first groups staying."""
    found: list[tuple[Found, Way]] = []
    seen: list[Placed] = []

    def look(way: Way, most: Budgets = budgets) -> None:
        placed = some_come(groups, most, way)
        if placed is not None and placed not in seen and (one := search.found(placed)) is not None:
            seen.append(placed)
            found.append((one, way))

    ways = ways_of(groups, budgets)
    for way in ways:
        look(way)
    best = min(found, key=lambda pair: pair[0].rank)[1] if found else ways[0]
    look(best._replace(due=1.0))
    if len(groups.sizes) <= _FEW:
        for way in shifted(best, len(budgets.devices), _SHIFTED):
            look(way)
    for at, size_bytes in enumerate(budgets.devices):
        if not found and len(budgets.devices) > 1:  # one computes everything
            alone = [size_bytes if other == at else 0 for other in range(len(budgets.devices))]
            for way in ways:
                look(way, replace(budgets, devices=tuple(alone)))
    return [one for one, _ in found]


def _plan(groups: Groups, found: Found) -> PlacePlan:
    sources, devices = groups.by_block(found.placed.sources), groups.by_block(found.placed.devices)
    return PlacePlan(
        sources=tuple(sources), devices=tuple(devices), windows=found.windows, seconds=found.seconds
    )


def _why_not(blocks: Sequence[Block], groups: Groups, budgets: Budgets) -> str:
    """What is missing."""
    total = sum(groups.sizes) + sum(groups.stays)
    held = sum(budgets.devices) + budgets.host + (budgets.disk or 0)
    if budgets.disk is not None and held < total:
        return (
            f"max_memory: the model takes {_shown(total)} and the devices may hold {_shown(held)} together: give "
            "them more, or leave the disk's budget out"
        )
    need, peak, kept = max(groups.needs), max(groups.peaks), sum(groups.kept) + sum(groups.stays)
    if budgets.in_place:
        return (
            f"max_memory: {_shown(kept)} stay in the host's memory for the whole model (buffers, keys and values), "
            f"beside activations up to {_shown(peak)}, and it may hold {_shown(max(budgets.devices))}: give 'cpu' at "
            f"least {_shown(kept + peak)}"
        )
    block = blocks[groups.firsts[groups.needs.index(need)]]
    part = "" if len(block.coming) == 1 else "a part of "
    return (
        f"max_memory: {part}{block.name!r} takes {_shown(need)}, activations up to {_shown(peak)}, {_shown(kept)} "
        f"stay for the whole model (buffers, keys and values), and no device may hold more than "
        f"{_shown(max(budgets.devices))}: give one at least {_shown(need + peak + kept)}"
    )


def _shown(size_bytes: int) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= size:
            return f"{size_bytes / size:.2f} {unit}"
    return f"{size_bytes} B"
