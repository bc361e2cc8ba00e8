"""A local search over placements: groups change places as long as that shortens the predicted forward. Pure."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

from drivetrain_dispatch.planning.block_groups import Forward, Groups
from drivetrain_dispatch.planning.device_map import Tier
from drivetrain_dispatch.planning.initial_placement import Budgets, Placed
from drivetrain_dispatch.planning.pipeline_model import Bandwidths, forward_seconds

_MOST_UNITS = 250_000  # units visited for one plan: a tenth of a second
_MOST_TRIED = 4_000  # placements of a small model
_LEAST_TRIED = 20  # fewer are not worth the time
_DEVICE, _HOST, _DISK = Tier.DEVICE, Tier.HOST, Tier.DISK  # an enumeration's member is slow to look up
_AWAY = (_HOST, _DISK)
_NEAREST = 6  # resident groups on either side of an offloaded one that are tried in its place


class Found(NamedTuple):
    """A placement that respects the budgets."""

    seconds: float
    coming_bytes: int  # the bytes that one forward fetches
    placed: Placed
    # The bytes that each device has left for fetched weights, at most what it ever fetches.
    windows: tuple[int, ...]

    @property
    def rank(self) -> tuple[float, int]:
        """The sort key of a placement; the smallest is the best."""
        return self.seconds, self.coming_bytes


class Search:
    """A search that improves placements of a model by their predicted times."""

    def __init__(self, groups: Groups, forward: Forward, budgets: Budgets, rates: Bandwidths) -> None:
        self._groups = groups
        self._forward = forward
        self._budgets = budgets
        self._rates = Bandwidths(to_device=inf, from_disk=rates.from_disk) if budgets.in_place else rates
        most = _MOST_UNITS // max(forward.num_units, 1)
        self._left = min(most, _MOST_TRIED) if most >= _LEAST_TRIED else 0

    def found(self, placed: Placed) -> Found | None:
        """Return a placement with its predicted time; None if it exceeds a budget or no device map expresses it."""
        windows = self._find_windows(placed)
        groups, most = self._groups, self._budgets
        held = [0] * len(Tier)
        for size, source in zip(groups.sizes, placed.sources, strict=True):
            held[source] += size
        fits_elsewhere = held[_HOST] <= most.host and (most.disk is None or held[_DISK] <= most.disk)
        if windows is None or not fits_elsewhere:
            return None
        sources, devices = groups.by_block(placed.sources), groups.by_block(placed.devices)
        if len(windows) > 1 and not _can_express(sources, devices):
            return None
        seconds = forward_seconds(
            self._forward.works(sources, devices),
            self._rates,
            windows=[inf] * len(windows) if most.in_place else windows,
        )
        pairs = zip(groups.sizes, placed.sources, strict=True)
        coming = sum([size for size, source in pairs if source is not _DEVICE])
        return Found(seconds, coming, placed, windows)

    def improved(self, found: Found, *, share: float = 1.0) -> Found:
        """Improve a placement by changes that shorten the forward; `share` is the part of the trials to use."""
        least = self._left - int(self._left * share)
        better: Found | None = found
        while better is not None:
            found, better = better, None
            for placed in self._list_neighbours(found.placed):
                if self._left <= least:
                    return found
                self._left -= 1
                other = self.found(placed)
                if other is not None and other.rank < found.rank:
                    better = other
                    break
        return found

    def _find_windows(self, placed: Placed) -> tuple[int, ...] | None:
        """Return the bytes that each device has left for fetched weights; None if a device has too few."""
        groups = self._groups
        count = len(self._budgets.devices)
        held, peaks, needs, coming = [0] * count, [0] * count, [0] * count, [0] * count
        for size, stays, need, peak, kept, source, device in zip(
            groups.sizes, groups.stays, groups.needs, groups.peaks, groups.kept, *placed, strict=True
        ):
            held[device] += stays + kept
            if peak > peaks[device]:
                peaks[device] = peak
            if source is _DEVICE:
                held[device] += size
            else:
                coming[device] += size
                if need > needs[device]:
                    needs[device] = need
        if self._budgets.in_place:
            needs = coming = [0] * count
        most = zip(self._budgets.devices, held, peaks, strict=True)
        left = [budget - weights - peak for budget, weights, peak in most]
        if any(room < need for room, need in zip(left, needs, strict=True)):
            return None
        return tuple(min(pair) if pair[1] else 0 for pair in zip(left, map(max, coming, needs), strict=True))

    def _list_neighbours(self, placed: Placed) -> Iterator[Placed]:
        """Yield neighbouring placements, the most promising first."""
        sources, devices = placed
        sizes = self._groups.sizes
        coming = [index for index, source in enumerate(sources) if source is not _DEVICE and sizes[index]]
        stay = [index for index, source in enumerate(sources) if source is _DEVICE and sizes[index]]
        for index in sorted(coming, key=lambda index: -sizes[index]):
            yield self._use_all_memory(_replace_sources(placed, {index: _DEVICE}), [index])
        for disk in [index for index in coming if sources[index] is _DISK]:
            yield self._use_all_memory(_replace_sources(placed, {disk: _HOST}), [disk])
            for host in [index for index in coming if sources[index] is _HOST]:
                yield _replace_sources(placed, {disk: _HOST, host: _DISK})
        for index in coming:
            for other in sorted(stay, key=lambda other, index=index: abs(other - index))[: 2 * _NEAREST]:
                swapped = _replace_sources(placed, {index: _DEVICE, other: sources[index]})
                yield swapped
                yield self._use_all_memory(swapped, [other, index])
            yield from self._swap_with_others(placed, index, stay)
        for start, (before, after) in enumerate(pairwise(devices), start=1):
            if before != after:
                for at, device in ((start - 1, after), (start, before)):
                    moved = Placed(sources, [*devices[:at], device, *devices[at + 1 :]])
                    yield moved
                    yield self._use_all_memory(moved, [])
                    yield self._use_all_memory(_replace_sources(moved, {at: _HOST}), [at])
                    yield self._use_all_memory(_replace_sources(moved, {at: _DEVICE}), [at])
        for index in stay:
            for source in _AWAY:
                yield _replace_sources(placed, {index: source})
            yield self._use_all_memory(_replace_sources(placed, {index: _HOST}), [index])

    def _swap_with_others(self, placed: Placed, index: int, stay: Sequence[int]) -> Iterator[Placed]:
        """Yield placements in which an offloaded group stays, and enough other groups leave to make room."""
        sizes, device = self._groups.sizes, placed.devices[index]
        others = [other for other in stay if placed.devices[other] == device]
        for largest_first in (False, True):
            changes: dict[int, Tier] = {index: _DEVICE}
            given = 0
            for other in sorted(others, key=lambda other: sizes[other], reverse=largest_first):
                if given >= sizes[index]:
                    break
                changes[other] = _HOST
                given += sizes[other]
            yield self._use_all_memory(_replace_sources(placed, changes), list(changes))

    def _use_all_memory(self, placed: Placed, fixed: Sequence[int]) -> Placed:
        """Return a placement that uses all memory: more groups stay, except `fixed` ones, and the host is full."""
        groups, sources = self._groups, list(placed.sources)
        by_size = sorted(range(len(sources)), key=lambda group: -groups.sizes[group])
        for at, budget in enumerate(self._budgets.devices):
            mine = [group for group in by_size if placed.devices[group] == at]
            room = budget - groups.fixed_bytes(mine)
            room -= sum([groups.sizes[group] for group in mine if sources[group] is _DEVICE])
            come = [group for group in mine if sources[group] is not _DEVICE]
            needy = sorted(come, key=groups.needs.__getitem__)  # the largest window last
            for group in come:
                if group in fixed or groups.sizes[group] > room:
                    continue
                # The largest window of the others that come; those at the end have left already.
                others = (
                    other for other in reversed(needy) if other != group and sources[other] is not _DEVICE
                )
                largest = None if self._budgets.in_place else next(others, None)
                need = 0 if largest is None else groups.needs[largest]
                if groups.sizes[group] + need <= room:
                    room -= groups.sizes[group]
                    sources[group] = _DEVICE
        away = [group for group in by_size if sources[group] is not _DEVICE]
        room = self._budgets.host - sum([groups.sizes[group] for group in away if sources[group] is _HOST])
        for group in reversed(away):  # the smallest first
            if room < 0 and sources[group] is _HOST:
                sources[group] = _DISK
                room += groups.sizes[group]
        for group in away:
            if sources[group] is _DISK and groups.sizes[group] <= room:
                sources[group] = _HOST
                room -= groups.sizes[group]
        return Placed(sources, placed.devices)


def _can_express(sources: Sequence[Tier], devices: Sequence[int]) -> bool:
    """Return whether a device map can express a placement."""
    # The nearest device named before an offloaded group computes it; before the first such device, that one.
    pairs = zip(sources, devices, strict=True)
    current = next((device for source, device in pairs if source is _DEVICE), devices[0])
    for source, device in zip(sources, devices, strict=True):
        if source is _DEVICE:
            current = device
        elif device != current:
            return False
    return True


def _replace_sources(placed: Placed, changes: dict[int, Tier]) -> Placed:
    sources = list(placed.sources)
    for index, source in changes.items():
        sources[index] = source
    return Placed(sources, placed.devices)
