"""Plan which blocks of a model stay on a device and which are fetched on demand. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from math import inf

from drivetrain_dispatch.errors import DeviceMapError
from drivetrain_dispatch.planning.block_groups import BlockCost, Forward, Groups, costs_of, groups_of
from drivetrain_dispatch.planning.blocks import Block
from drivetrain_dispatch.planning.device_map import Tier
from drivetrain_dispatch.planning.initial_placement import (
    Budgets,
    OffloadStrategy,
    Placed,
    all_stay,
    shifted,
    some_come,
    strategies_of,
)
from drivetrain_dispatch.planning.local_search import Found, Search
from drivetrain_dispatch.planning.pipeline_model import Bandwidths, forward_seconds
from drivetrain_messages import format_size

_UNUSED = Bandwidths(to_device=inf, from_disk=inf)  # for a forward that fetches nothing
_NUM_IMPROVED = 8  # placements from which the local search starts
# A model of at most this many groups also tries device segments shifted by up to this many groups.
_FEW, _SHIFTED = 200, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacePlan:
    """The home and the computing device of each block."""

    sources: tuple[Tier, ...]
    devices: tuple[int, ...]  # the device that computes each block, as an index into `Budgets.devices`
    windows: tuple[int, ...]  # the most bytes of fetched weights that each device may hold at once
    seconds: float


def plan_places(
    blocks: Sequence[Block],
    costs: Mapping[str, BlockCost],
    budgets: Budgets,
    rates: Bandwidths | Callable[[], Bandwidths],
) -> PlacePlan:
    """Plan where the blocks of a model are stored, so that peak memory stays within every budget.

    If the whole model fits, the devices are filled in order, so that activations seldom change devices. Otherwise as
    many blocks as possible stay. The other blocks are spread evenly among these and prefetched into the device's
    window. The plan tries several window sizes (small ones win if transfers are slower than computation), improves
    the best placements by local search, and takes the shortest predicted forward.
    """
    each = costs_of(blocks, costs)
    groups, forward = groups_of(blocks, each), Forward(blocks, each)
    if (placed := all_stay(groups, budgets.devices)) is not None:
        found = Search(groups, forward, budgets, _UNUSED).found(placed)
        assert found is not None
        return _plan(groups, found)
    search = Search(groups, forward, budgets, rates() if callable(rates) else rates)
    begun = _find_first_placements(search, groups, budgets)
    if not begun:
        raise DeviceMapError(_explain_failure(blocks, groups, budgets))
    best = nsmallest(_NUM_IMPROVED, begun, key=lambda found: found.rank)
    better = [search.improved(found, share=1 / (len(best) - at)) for at, found in enumerate(best)]
    return _plan(groups, min(better, key=lambda found: found.rank))


def predicted_seconds(
    plan: PlacePlan,
    blocks: Sequence[Block],
    costs: Mapping[str, BlockCost],
    rates: Bandwidths,
    *,
    in_place: bool = False,
) -> float:
    """Predict the seconds of a forward under a plan, which may have been made for another forward."""
    works = Forward(blocks, costs_of(blocks, costs)).works(plan.sources, plan.devices)
    if in_place:
        rates = Bandwidths(to_device=inf, from_disk=rates.from_disk)
    return forward_seconds(works, rates, windows=[inf] * len(plan.windows) if in_place else plan.windows)


def _find_first_placements(search: Search, groups: Groups, budgets: Budgets) -> list[Found]:
    """Return distinct initial placements: one of every strategy, and variants of the best."""
    found: list[tuple[Found, OffloadStrategy]] = []
    seen: list[Placed] = []

    def look(strategy: OffloadStrategy, most: Budgets = budgets) -> None:
        placed = some_come(groups, most, strategy)
        if placed is not None and placed not in seen and (one := search.found(placed)) is not None:
            seen.append(placed)
            found.append((one, strategy))

    strategies = strategies_of(groups, budgets)
    for strategy in strategies:
        look(strategy)
    best = min(found, key=lambda pair: pair[0].rank)[1] if found else strategies[0]
    look(best._replace(due=1.0))
    if len(groups.sizes) <= _FEW:
        for strategy in shifted(best, len(budgets.devices), _SHIFTED):
            look(strategy)
    for at, size_bytes in enumerate(budgets.devices):
        if not found and len(budgets.devices) > 1:  # a single device computes everything
            alone = [size_bytes if other == at else 0 for other in range(len(budgets.devices))]
            for strategy in strategies:
                look(strategy, replace(budgets, devices=tuple(alone)))
    return [one for one, _ in found]


def _plan(groups: Groups, found: Found) -> PlacePlan:
    sources, devices = groups.by_block(found.placed.sources), groups.by_block(found.placed.devices)
    return PlacePlan(
        sources=tuple(sources), devices=tuple(devices), windows=found.windows, seconds=found.seconds
    )


def _explain_failure(blocks: Sequence[Block], groups: Groups, budgets: Budgets) -> str:
    """Return an error message that names the budget that is too small and a sufficient budget."""
    total = sum(groups.sizes) + sum(groups.stays)
    held = sum(budgets.devices) + budgets.host + (budgets.disk or 0)
    if budgets.disk is not None and held < total:
        return (
            f"max_memory: the model takes {format_size(total)} and the devices may hold {format_size(held)} "
            "together: give them more, or leave the disk's budget out"
        )
    need, peak, kept = max(groups.needs), max(groups.peaks), sum(groups.kept) + sum(groups.stays)
    if budgets.in_place:
        return (
            f"max_memory: {format_size(kept)} stay in the host's memory for the whole model (buffers, keys and "
            f"values), beside activations up to {format_size(peak)}, and it may hold "
            f"{format_size(max(budgets.devices))}: give 'cpu' at least {format_size(kept + peak)}"
        )
    block = blocks[groups.firsts[groups.needs.index(need)]]
    part = "" if len(block.coming) == 1 else "a part of "
    return (
        f"max_memory: {part}{block.name!r} takes {format_size(need)}, activations up to {format_size(peak)}, "
        f"{format_size(kept)} stay for the whole model (buffers, keys and values), and no device may hold more than "
        f"{format_size(max(budgets.devices))}: give one at least {format_size(need + peak + kept)}"
    )
