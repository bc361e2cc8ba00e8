"""The planner's view of a model: groups of blocks placed together, their memory, and the work of a forward. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from drivetrain_dispatch.planning.blocks import Block
from drivetrain_dispatch.planning.device_map import Tier

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """The cost of a block in one forward.

    Attributes:
        seconds: The compute time with the weights on the device, in seconds.
        peak_bytes: The bytes of activations at their peak.
        kept_bytes: The bytes that stay on the device afterwards, such as keys and values.
    """

    seconds: float = 0.0
    peak_bytes: int = 0
    kept_bytes: int = 0


class Groups(NamedTuple):
    """The groups of a model, as one list per property; blocks that share tensors are one group."""

    firsts: list[int]
    sizes: list[int]
    stays: list[int]  # the bytes of each group's tensors that always stay on the device that computes
    # The bytes of window that it takes to fetch a unit of the group, including the units in use around
    # it.
    needs: list[int]
    peaks: list[int]
    kept: list[int]  # the bytes that each group's blocks leave on the device
    of_blocks: list[int] | None  # the index of each block's group; None if every block is a group of its own

    def by_block(self, values: list[_Value]) -> list[_Value]:
        """Expand a list of values per group to a list of values per block."""
        return values if self.of_blocks is None else [values[index] for index in self.of_blocks]

    def fixed_bytes(self, segment: Sequence[int]) -> int:
        """Return the bytes that a device holds while it computes groups, wherever their offloadable weights are."""
        peak = max([self.peaks[group] for group in segment], default=0)
        return peak + sum([self.kept[group] + self.stays[group] for group in segment])


def costs_of(blocks: Sequence[Block], costs: Mapping[str, BlockCost]) -> list[BlockCost]:
    """Return the cost of each block; a block without an entry costs nothing."""
    nothing = BlockCost()
    return [costs.get(block.name, nothing) for block in blocks] if costs else [nothing] * len(blocks)


def groups_of(blocks: Sequence[Block], costs: Sequence[BlockCost]) -> Groups:
    """Return the groups of a model, in the order of their first blocks."""
    # Lists instead of one object per group: there may be 100,000 of them.
    groups = Groups(
        list(range(len(blocks))),
        [block.size_bytes - block.stay_bytes for block in blocks],
        [block.stay_bytes for block in blocks],
        _measure_needs(blocks),
        [cost.peak_bytes for cost in costs],
        [cost.kept_bytes for cost in costs],
        None,
    )
    firsts = [index for index, block in enumerate(blocks) if block.group == index]
    if len(firsts) == len(blocks):
        return groups
    numbers = {first: number for number, first in enumerate(firsts)}
    of_blocks = [numbers[block.group] for block in blocks]
    zeros = [0] * len(firsts)
    joined = Groups(firsts, zeros.copy(), zeros.copy(), zeros.copy(), zeros.copy(), zeros.copy(), of_blocks)
    for index, number in enumerate(of_blocks):
        joined.sizes[number] += groups.sizes[index]
        joined.stays[number] += groups.stays[index]
        joined.needs[number] = max(joined.needs[number], groups.needs[index])
        joined.peaks[number] = max(joined.peaks[number], groups.peaks[index])
        joined.kept[number] += groups.kept[index]
    return joined


def _measure_needs(blocks: Sequence[Block]) -> list[int]:
    """Return the window for each block, with its neighbouring units, which may be fetched at the same time."""
    if all(block.end < 0 for block in blocks):
        return [block.need_bytes for block in blocks]
    needs: list[int] = []
    # For each unit around the next block: its bytes, and the last block inside it.
    around: list[tuple[int, int]] = []
    for index, block in enumerate(blocks):
        around = [(size_bytes, end) for size_bytes, end in around if end >= index]
        needs.append(block.need_bytes + sum([size_bytes for size_bytes, _ in around]))
        if block.around_bytes and block.end > index:
            around.append((block.around_bytes, block.end))
    return needs


class Forward:
    """A forward of a model, as work for the pipeline model."""

    def __init__(self, blocks: Sequence[Block], costs: Sequence[BlockCost]) -> None:
        self._seconds = [cost.seconds for cost in costs]
        self._units = [block.coming for block in blocks]
        self._around = {
            index: (block.around_bytes, max(block.end, index))
            for index, block in enumerate(blocks)
            if block.around_bytes
        }
        self.num_units = sum(map(len, self._units))

    def works(
        self, sources: Sequence[Tier], devices: Sequence[int]
    ) -> Iterator[tuple[float, int, Tier, int, int | None]]:
        """Yield the work of each unit for `forward_seconds`; a block's time is divided among its units by bytes."""
        # Enclosing units by the last block inside them: device and bytes.
        around: dict[int, list[tuple[int, int]]] = {}
        on_device = Tier.DEVICE
        for index, (seconds, units, source, device) in enumerate(
            zip(self._seconds, self._units, sources, devices, strict=True)
        ):
            if source is on_device:
                yield seconds, 0, source, device, 0
            elif len(units) == 1 and index not in self._around:
                yield seconds, units[0], source, device, None
            else:
                total = sum(units)
                if index in self._around:
                    size_bytes, end = self._around[index]
                    around.setdefault(end, []).append((device, size_bytes))
                    yield 0.0 if total else seconds, size_bytes, source, device, 0
                for size_bytes in units:
                    yield seconds * size_bytes / total if total else 0.0, size_bytes, source, device, None
            if around and index in around:
                for place, size_bytes in around.pop(index):
                    yield 0.0, 0, Tier.DEVICE, place, size_bytes
