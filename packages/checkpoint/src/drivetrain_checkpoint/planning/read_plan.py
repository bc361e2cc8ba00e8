"""Plan which bytes of which files this rank reads, and the tensors they fill."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from drivetrain_checkpoint.format.division import Division
from drivetrain_checkpoint.format.manifest import Manifest
from drivetrain_checkpoint.format.shards import TensorShard
from drivetrain_weights.tensor_box import Box, overlap

_MOST_BYTES = 64 * 2**20  # of the buffer for rows of which only some columns are wanted


class Read(NamedTuple):
    """A byte range of a file and the tensor that it fills.

    Attributes:
        target: The tensor to fill; contiguous if `rows` is None.
        rows: The box of elements in the byte range; None if all of these elements are wanted.
        part: The box of wanted elements inside `rows`, which `target` gets; None if `rows` is None.
    """

    start: int
    size_bytes: int
    target: Tensor
    rows: Box | None = None
    part: Box | None = None


class _Stretch(NamedTuple):
    """A read that is the same for all tensors with one division and the same wanted shards."""

    start: int  # from the first byte of the tensor in the file on
    size_bytes: int
    shard: int
    wanted: tuple[slice, ...] | None
    rows: Box | None
    part: Box | None


_Stretches: TypeAlias = Mapping[int, Sequence[_Stretch]]  # by the rank in whose file they lie


def plan_reads(
    manifest: Manifest, part: str, wanted: Mapping[str, Sequence[TensorShard]]
) -> Iterator[tuple[int, list[Read]]]:
    """Yield each file's reads in byte order, after the rank that wrote the file."""
    known: dict[object, _Stretches] = {}
    stretches: dict[str, _Stretches] = {}
    for name, shards in wanted.items():
        division = manifest.tensors[part][name]
        alike = (division, *((shard.box, shard.data.stride()) for shard in shards))
        if (found := known.get(alike)) is None:
            found = known[alike] = _stretches(division, shards)
        stretches[name] = found
    for rank in sorted({rank for found in known.values() for rank in found}):
        reads: list[Read] = []
        for name, start in manifest.starts_in(part, rank).items():
            for one in stretches[name].get(rank, ()) if name in stretches else ():
                data = wanted[name][one.shard].data
                target = data if one.wanted is None else data[one.wanted]
                reads.append(Read(start + one.start, one.size_bytes, target, one.rows, one.part))
        yield rank, sorted(reads, key=lambda read: read.start)


def _stretches(division: Division, shards: Sequence[TensorShard]) -> _Stretches:
    """Return the reads that fill the shards of a tensor."""
    found: dict[int, list[_Stretch]] = {}
    for rank, boxes in division.boxes.items():
        start = 0
        for box in boxes:
            for index, shard in enumerate(shards):
                if (common := overlap(box, shard.box)) is not None:
                    of_rank = found.setdefault(rank, [])
                    of_rank += _of_box(box, start, division.item_bytes, index, shard, common)
            start += box.num_elements * division.item_bytes
    return found


def _of_box(
    box: Box, start: int, item_bytes: int, index: int, shard: TensorShard, common: Box
) -> Iterator[_Stretch]:
    """Yield the reads that cover the overlap of a stored box and a shard."""
    # Contiguous in the file: the wanted range of the first dimension longer than 1, and the inner ones in full.
    axis = next((axis for axis, size in enumerate(common.sizes) if size > 1), len(common.sizes))
    run = Box(
        offsets=(*common.offsets[: axis + 1], *box.offsets[axis + 1 :]),
        sizes=(*common.sizes[: axis + 1], *box.sizes[axis + 1 :]),
    )
    wanted = common.slices(within=shard.box)
    if run == common and shard.data[wanted].is_contiguous():
        first = start + _first_in(box, run) * item_bytes
        yield _Stretch(
            first, run.num_elements * item_bytes, index, None if common == shard.box else wanted, None, None
        )
        return
    for rows in run.cut(_MOST_BYTES // item_bytes):
        if (part := overlap(rows, common)) is not None:
            first = start + _first_in(box, rows) * item_bytes
            yield _Stretch(
                first, rows.num_elements * item_bytes, index, part.slices(within=shard.box), rows, part
            )


def _first_in(box: Box, run: Box) -> int:
    """Return where the first element of `run` lies in `box`: the index in row-major order."""
    strides = (prod(box.sizes[axis + 1 :]) for axis in range(len(box.sizes)))
    return sum((a - b) * stride for a, b, stride in zip(run.offsets, box.offsets, strides, strict=True))


def fill(read: Read, content: Tensor) -> None:
    """Copy the wanted part of a partial read into its target."""
    assert read.rows is not None
    assert read.part is not None
    rows = content.view(read.target.dtype).view(read.rows.sizes)
    with torch.no_grad():
        read.target.copy_(rows[read.part.slices(within=read.rows)])
