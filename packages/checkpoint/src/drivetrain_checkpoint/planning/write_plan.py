"""Plan which rank writes which part of which tensor: each element once, bytes balanced across ranks. Pure.

torch's DCP has planners for this too, but they do not support flat shards, pickle the metadata and have no checksums.
This format needs only the greedy choice below, and file headers that are known before anything is written.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from drivetrain_checkpoint.errors import StateError
from drivetrain_weights.tensor_box import Box, overlap, whole

_LEAST_CUT_BYTES = 2**20  # a smaller box is not worth splitting


class TensorName(NamedTuple):
    """The name of a tensor: the part of the checkpoint that it belongs to, and its name in that part."""

    part: str
    name: str


class AvailableBoxes(NamedTuple):
    """The boxes of a tensor that a rank can write.

    Attributes:
        dtype: The safetensors name of the dtype.
        item_bytes: The size of one element in bytes.
        shape: The shape of the whole tensor.
        boxes: The boxes that the rank holds.
    """

    dtype: str
    item_bytes: int
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


class WrittenBox(NamedTuple):
    """A box of a tensor that a rank writes."""

    tensor: TensorName
    box: Box


@dataclass(frozen=True, slots=True)
class _Unit:
    entry: WrittenBox
    size_bytes: int
    holders: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WritePlan:
    """The plan of which rank writes what.

    Attributes:
        tensors: The whole tensors by name, in order.
        entries: The entries that each rank writes, by rank, in the order of the tensors.
    """

    tensors: Mapping[TensorName, AvailableBoxes]
    entries: tuple[tuple[WrittenBox, ...], ...]


def plan_writes(
    tensors: Mapping[TensorName, AvailableBoxes], ranks: Sequence[Mapping[TensorName, AvailableBoxes]]
) -> WritePlan:
    """Plan which boxes each rank writes.

    A rank writes the boxes that it alone holds. A box that several ranks hold goes to the one of them with the fewest
    bytes, split into pieces if it is large. The same arguments give the same plan on every rank.

    Args:
        tensors: The tensors to write, in order, as rank 0 describes them.
        ranks: The holdings of each rank; tensors that a rank does not hold may be missing.

    Raises:
        StateError: The ranks disagree about a tensor, or their boxes leave a gap in it or overlap.
    """
    units: list[_Unit] = []
    for name, tensor in tensors.items():
        units += _units(name, tensor, _holders(name, tensor, ranks))
    shared_bytes = sum(unit.size_bytes for unit in units if len(unit.holders) > 1)
    most = max(_LEAST_CUT_BYTES, shared_bytes // (4 * len(ranks)))
    chosen: list[list[WrittenBox]] = [[] for _ in ranks]
    load = [0] * len(ranks)
    for unit in units:
        if len(unit.holders) == 1:
            load[unit.holders[0]] += unit.size_bytes
    cut = [piece for unit in units for piece in _pieces(unit, most)]
    writer: dict[WrittenBox, int] = {}
    for unit in sorted(cut, key=lambda unit: -unit.size_bytes):
        rank = unit.holders[0]
        if len(unit.holders) > 1:
            rank = min(unit.holders, key=load.__getitem__)
            load[rank] += unit.size_bytes
        writer[unit.entry] = rank
    for unit in cut:  # in the order of the state, not by size
        chosen[writer[unit.entry]].append(unit.entry)
    return WritePlan(tensors, tuple(map(tuple, chosen)))


def _holders(
    name: TensorName, tensor: AvailableBoxes, ranks: Sequence[Mapping[TensorName, AvailableBoxes]]
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


def _check_whole(name: TensorName, tensor: AvailableBoxes, boxes: Sequence[Box]) -> None:
    """Check that boxes cover a tensor without gaps or overlaps.

    Raises:
        StateError: The boxes leave a gap, or overlap.
    """
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


def _units(name: TensorName, tensor: AvailableBoxes, holders: Mapping[Box, Iterable[int]]) -> list[_Unit]:
    return [
        _Unit(WrittenBox(name, box), box.num_elements * tensor.item_bytes, tuple(ranks))
        for box, ranks in holders.items()
    ]


def _pieces(unit: _Unit, most_bytes: int) -> list[_Unit]:
    """Split a unit that several ranks hold into pieces, so that the ranks can share the work."""
    if len(unit.holders) == 1 or unit.size_bytes <= most_bytes:
        return [unit]
    box = unit.entry.box
    item_bytes = unit.size_bytes // box.num_elements
    return [
        _Unit(WrittenBox(unit.entry.tensor, piece), piece.num_elements * item_bytes, unit.holders)
        for piece in box.cut(most_bytes // item_bytes)
    ]


def _shown(name: TensorName) -> str:
    return f"{name.part}: {name.name!r}"
