"""Plan the parts of tensors that each rank writes: each element once, bytes balanced across ranks. Pure.

torch's DCP has planners too, but they pickle the metadata, and support neither flat shards nor checksums. This format
needs only the greedy choice below, and file headers that are known before anything is written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from typing import NamedTuple

from drivetrain_checkpoint.errors import StateError
from drivetrain_checkpoint.format.division import Division, Divisions
from drivetrain_weights.tensor_box import Box, overlap, whole

_LEAST_CUT_BYTES = 2**20  # a smaller box is not worth splitting


class TensorName(NamedTuple):
    """The name of a tensor: its part of the checkpoint, and its name in that part."""

    part: str
    name: str


class AvailableBoxes(NamedTuple):
    """The boxes of a tensor that a rank can write."""

    dtype: str
    item_bytes: int
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """The boxes that a rank can write of each tensor in a plan; tensors with equal boxes share a kind."""

    kinds: tuple[AvailableBoxes, ...]  # the distinct ways in which it holds a tensor
    kind_of: Sequence[int]  # for each tensor the index of its kind; -1 if the rank does not have it

    def kind(self, index: int) -> AvailableBoxes | None:
        """Return a kind by its index in `kinds`; None for -1, the index of a tensor that the rank does not have."""
        return None if index < 0 else self.kinds[index]


@dataclass(frozen=True, slots=True)
class _Unit:
    """A box to write of each of several tensors that the ranks hold in the same way."""

    box: Box
    size_bytes: int
    holders: tuple[int, ...]
    count: int
    tensors: int  # the index of the first of them, which names them all


def plan_writes(names: Sequence[TensorName], ranks: Sequence[Held]) -> Divisions:
    """Plan which boxes each rank writes.

    A rank writes the boxes that it alone holds. If several ranks hold a box, the rank with the fewest bytes so far
    writes it; a large box is split into pieces first. The first rank that has a tensor gives its shape and dtype. The
    same arguments give the same plan on every rank.

    Raises:
        StateError: The ranks disagree about a tensor, or their boxes leave a gap in it or overlap.
    """
    alike: dict[tuple[int, ...], list[int]] = {}
    for index, row in enumerate(zip(*(rank.kind_of for rank in ranks), strict=True)):
        alike.setdefault(row, []).append(index)
    units = [
        unit
        for row, tensors in alike.items()
        for unit in _units(
            names[tensors[0]], tensors, [rank.kind(i) for rank, i in zip(ranks, row, strict=True)]
        )
    ]
    runs = _assigned(units, len(ranks))
    divisions: list[Division | None] = [None] * len(names)
    for row, tensors in alike.items():
        described = next(
            kind for rank, i in zip(ranks, row, strict=True) if (kind := rank.kind(i)) is not None
        )
        _divide(described, tensors, runs[tensors[0]], divisions)
    plan: dict[str, dict[str, Division]] = {}
    for (part, name), division in zip(names, divisions, strict=True):
        assert division is not None
        plan.setdefault(part, {})[name] = division
    return plan


def _units(name: TensorName, tensors: Sequence[int], held: Sequence[AvailableBoxes | None]) -> list[_Unit]:
    """Return the boxes of tensors that are held alike."""
    first, described = next((rank, kind) for rank, kind in enumerate(held) if kind is not None)
    holders: dict[Box, list[int]] = {}
    for rank, own in enumerate(held):
        if own is None or not own.boxes:
            continue
        if (own.dtype, own.shape) != (described.dtype, described.shape):
            raise StateError(
                f"{_shown(name)} is {own.dtype} {list(own.shape)} on rank {rank} and {described.dtype} "
                f"{list(described.shape)} on rank {first}: a state's tensors must agree between ranks"
            )
        for box in own.boxes:
            holders.setdefault(box, []).append(rank)
    if not holders and 0 in described.shape:
        holders[whole(described.shape)] = [0]
    _check_whole(name, described, sorted(holders))
    return [
        _Unit(box, box.num_elements * described.item_bytes, tuple(ranks), len(tensors), tensors[0])
        for box, ranks in holders.items()
    ]


def _check_whole(name: TensorName, tensor: AvailableBoxes, boxes: Sequence[Box]) -> None:
    """Check that boxes cover a tensor without gaps or overlaps."""
    held, size = sum(box.num_elements for box in boxes), whole(tensor.shape).num_elements
    if held != size:
        raise StateError(
            f"{_shown(name)}: the ranks hold {held} of its {size} elements; save on all ranks that hold a part of it"
        )
    open_boxes: list[Box] = []
    for box in boxes:  # sorted by offset along the first dimension
        open_boxes = [one for one in open_boxes if one.offsets[0] + one.sizes[0] > box.offsets[0]]
        if any(overlap(one, box) for one in open_boxes):
            raise StateError(
                f"{_shown(name)}: ranks hold parts that overlap in part, {box} among them; divide it evenly, or "
                "give the whole on rank 0"
            )
        if box.sizes:
            open_boxes.append(box)


def _assigned(
    units: Sequence[_Unit], num_ranks: int
) -> Mapping[int, list[tuple[Box, list[tuple[int, int]]]]]:
    """Return the boxes of each unit's tensors with their writers: pairs of a rank and its number of tensors."""
    shared_bytes = sum(unit.size_bytes * unit.count for unit in units if len(unit.holders) > 1)
    most = max(_LEAST_CUT_BYTES, shared_bytes // (4 * num_ranks))
    load = [0] * num_ranks
    for unit in units:
        if len(unit.holders) == 1:
            load[unit.holders[0]] += unit.size_bytes * unit.count
    pieces: list[_Unit] = []
    for unit in units:
        if len(unit.holders) == 1 or unit.size_bytes <= most:
            pieces.append(unit)
            continue
        # Several ranks hold the unit: they share the work.
        item_bytes = unit.size_bytes // unit.box.num_elements
        pieces.extend(
            _Unit(box, box.num_elements * item_bytes, unit.holders, unit.count, unit.tensors)
            for box in unit.box.cut(most // item_bytes)
        )
    runs: dict[int, list[tuple[Box, list[tuple[int, int]]]]] = {}
    for unit in sorted(pieces, key=lambda piece: -piece.size_bytes):
        counts = dict.fromkeys(unit.holders, 0)
        if len(counts) == 1:
            counts[unit.holders[0]] = unit.count
        else:  # each box goes to the holder with the fewest bytes
            least = [(load[rank], rank) for rank in unit.holders]
            heapify(least)
            for _ in range(unit.count):
                rank = least[0][1]
                counts[rank] += 1
                load[rank] += unit.size_bytes
                heapreplace(least, (load[rank], rank))
        writers = [(rank, count) for rank, count in counts.items() if count]
        runs.setdefault(unit.tensors, []).append((unit.box, writers))
    return runs


def _divide(
    described: AvailableBoxes,
    tensors: Sequence[int],
    boxes: Sequence[tuple[Box, Sequence[tuple[int, int]]]],
    divisions: list[Division | None],
) -> None:
    """Set the divisions of tensors that are held alike: consecutive tensors with the same writers share one."""
    ends = [list(accumulate(count for _, count in writers)) for _, writers in boxes]
    at = [0] * len(boxes)  # the writer of each box
    for start, stop in pairwise(sorted({0, *(end for one in ends for end in one)})):
        by_rank: dict[int, list[Box]] = {}
        for index, (box, writers) in enumerate(boxes):
            while ends[index][at[index]] <= start:
                at[index] += 1
            by_rank.setdefault(writers[at[index]][0], []).append(box)
        division = Division(
            described.dtype,
            described.item_bytes,
            described.shape,
            {rank: tuple(sorted(by_rank[rank])) for rank in sorted(by_rank)},
        )
        for index in tensors[start:stop]:
            divisions[index] = division


def _shown(name: TensorName) -> str:
    return f"{name.part}: {name.name!r}"
