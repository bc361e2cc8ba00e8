"""Which rank writes which part of which tensor: each element once, bytes spread evenly. Pure.

torch's DCP has planners for this too. They know no runs of elements, put metadata into a pickle, and leave checksums
to nobody; what is needed here is the greedy choice below and a header that is known before anything is written.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from drivetrain_checkpoint.errors import StateError
from drivetrain_checkpoint.format.boxes import Box, overlap, whole

_LEAST_CUT_BYTES = 2**20  # a smaller tensor is not worth a second entry


class TensorName(NamedTuple):
    """Which tensor: the part of the checkpoint that it belongs to, and its name in there."""

    part: str
    name: str


class Holding(NamedTuple):
    """What a rank can write of a tensor.

    Attributes:
        dtype: As safetensors calls it.
        item_bytes: Of one element.
        shape: That of the whole tensor.
        boxes: What this rank can write of it.
    """

    dtype: str
    item_bytes: int
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


class Entry(NamedTuple):
    """A box of a tensor that a rank writes."""

    tensor: TensorName
    box: Box


@dataclass(frozen=True, slots=True)
class _Unit:
    entry: Entry
    size_bytes: int
    holders: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Who writes what.

    Attributes:
        tensors: All tensors, in order.
        entries: What each rank writes, in the order of the tensors.
    """

    tensors: Mapping[TensorName, Holding]
    entries: tuple[tuple[Entry, ...], ...]


def plan_writes(
    tensors: Mapping[TensorName, Holding], ranks: Sequence[Mapping[TensorName, Holding]]
) -> WritePlan:
    """Plan what each rank writes.

    What one rank alone holds, it writes; what several hold goes to the one with the least to do, in pieces if large.
    The same arguments give the same plan on every rank.

    Args:
        tensors: All that are to be written, in order, as rank 0 describes them.
        ranks: Each rank's own description; what a rank does not hold may be missing.

    Raises:
        StateError: The ranks differ about a tensor, or hold none or too much of a part of it.
    """
    units: list[_Unit] = []
    for name, tensor in tensors.items():
        units += _units(name, tensor, _holders(name, tensor, ranks))
    shared_bytes = sum(unit.size_bytes for unit in units if len(unit.holders) > 1)
    most = max(_LEAST_CUT_BYTES, shared_bytes // (4 * len(ranks)))
    chosen: list[list[Entry]] = [[] for _ in ranks]
    load = [0] * len(ranks)
    for unit in units:
        if len(unit.holders) == 1:
            load[unit.holders[0]] += unit.size_bytes
    cut = [piece for unit in units for piece in _pieces(unit, most)]
    writer: dict[Entry, int] = {}
    for unit in sorted(cut, key=lambda unit: -unit.size_bytes):
        rank = unit.holders[0]
        if len(unit.holders) > 1:
            rank = min(unit.holders, key=load.__getitem__)
            load[rank] += unit.size_bytes
        writer[unit.entry] = rank
    for unit in cut:  # in the order of the state, not of sizes
        chosen[writer[unit.entry]].append(unit.entry)
    return WritePlan(tensors, tuple(map(tuple, chosen)))


def _holders(
    name: TensorName, tensor: Holding, ranks: Sequence[Mapping[TensorName, Holding]]
) -> dict[Box, list[int]]:
    holders: dict[Box, list[int]] = {}
    for rank, described in enumerate(ranks):
        if (own := described.get(name)) is None or not own.boxes:
            continue
        if (own.dtype, own.shape) != (tensor.dtype, tensor.shape):
            raise StateError(
                f"{_shown(name)} is {own.dtype} {list(own.shape)} on rank {rank} and {tensor.dtype} "
                f"{list(tensor.shape)} on rank 0: a state's tensors must agree between ranks"
            )
        for box in own.boxes:
            holders.setdefault(box, []).append(rank)
    if not holders and 0 in tensor.shape:
        holders[whole(tensor.shape)] = [0]
    _check_whole(name, tensor, sorted(holders))
    return holders


def _check_whole(name: TensorName, tensor: Holding, boxes: Sequence[Box]) -> None:
    """Check that boxes are the tensor, without a gap and without a second time."""
    held, size = sum(box.num_elements for box in boxes), whole(tensor.shape).num_elements
    if held != size:
        raise StateError(
            f"{_shown(name)}: the ranks hold {held} of its {size} elements; save on all ranks that hold a part of it"
        )
    open_boxes: list[Box] = []
    for box in boxes:  # sorted by where they begin along the first dimension
        open_boxes = [one for one in open_boxes if one.offsets[0] + one.sizes[0] > box.offsets[0]]
        if any(overlap(one, box) for one in open_boxes):
            raise StateError(
                f"{_shown(name)}: ranks hold parts that overlap in part, {box} among them; divide it evenly, or "
                "give the whole on rank 0"
            )
        if box.sizes:
            open_boxes.append(box)


def _units(name: TensorName, tensor: Holding, holders: Mapping[Box, Iterable[int]]) -> list[_Unit]:
    return [
        _Unit(Entry(name, box), box.num_elements * tensor.item_bytes, tuple(ranks))
        for box, ranks in holders.items()
    ]


def _pieces(unit: _Unit, most_bytes: int) -> list[_Unit]:
    """A unit that several ranks hold, in pieces that they can share."""
    if len(unit.holders) == 1 or unit.size_bytes <= most_bytes:
        return [unit]
    box = unit.entry.box
    item_bytes = unit.size_bytes // box.num_elements
    return [
        _Unit(Entry(unit.entry.tensor, piece), piece.num_elements * item_bytes, unit.holders)
        for piece in box.cut(most_bytes // item_bytes)
    ]


def _shown(name: TensorName) -> str:
    return f"{name.part}: {name.name!r}"
