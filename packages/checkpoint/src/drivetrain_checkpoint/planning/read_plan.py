"""Plan which bytes of which files this rank reads, and the tensors they fill."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from drivetrain_checkpoint.format.manifest import StoredBox
from drivetrain_checkpoint.format.shards import TensorShard
from drivetrain_weights.tensor_box import Box, overlap

_MOST_BYTES = 64 * 2**20  # of the buffer for rows of which only some columns are wanted


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """A byte range of a file and the tensor that it fills.

    Attributes:
        file: The name of the file.
        start: The first byte in the file.
        size_bytes: The number of bytes.
        target: The tensor to fill; contiguous if `rows` is None.
        rows: The box that the byte range holds, if only a part of it is wanted; else None.
        part: The box inside `rows` that `target` holds, if only a part is wanted; else None.
    """

    file: str
    start: int
    size_bytes: int
    target: Tensor
    rows: Box | None = None
    part: Box | None = None


def plan_reads(wanted: Iterable[tuple[Sequence[StoredBox], Sequence[TensorShard]]]) -> dict[str, list[Read]]:
    """Return the reads by file, in byte order.

    Args:
        wanted: For each tensor, the pieces in which it is stored and the shards to fill.
    """
    reads: dict[str, list[Read]] = {}
    for pieces, shards in wanted:
        for shard in shards:
            for piece in pieces:
                if (common := overlap(piece.box, shard.box)) is not None:
                    reads.setdefault(piece.file, []).extend(_reads(piece, shard, common))
    return {file: sorted(found, key=lambda read: read.start) for file, found in sorted(reads.items())}


def _reads(piece: StoredBox, shard: TensorShard, common: Box) -> list[Read]:
    """Return the reads that cover the overlap of a piece and a shard."""
    target = shard.data[common.slices(within=shard.box)]
    # Contiguous in the file: the wanted range of the first dimension longer than 1, and the inner ones in full.
    axis = next((axis for axis, size in enumerate(common.sizes) if size > 1), len(common.sizes))
    run = Box(
        offsets=(*common.offsets[: axis + 1], *piece.box.offsets[axis + 1 :]),
        sizes=(*common.sizes[: axis + 1], *piece.box.sizes[axis + 1 :]),
    )
    if run == common and target.is_contiguous():
        return [_read(piece, run, target)]
    return [
        _read(piece, rows, shard.data[part.slices(within=shard.box)], part)
        for rows in run.cut(_MOST_BYTES // target.element_size())
        if (part := overlap(rows, common)) is not None
    ]


def _read(piece: StoredBox, run: Box, target: Tensor, part: Box | None = None) -> Read:
    strides = [prod(piece.box.sizes[axis + 1 :]) for axis in range(len(piece.box.sizes))]
    first = sum(
        (a - b) * stride for a, b, stride in zip(run.offsets, piece.box.offsets, strides, strict=True)
    )
    item_bytes = target.element_size()
    return Read(
        file=piece.file,
        start=piece.start + first * item_bytes,
        size_bytes=run.num_elements * item_bytes,
        target=target,
        rows=run if part is not None else None,
        part=part,
    )


def fill(read: Read, content: Tensor) -> None:
    """Copy the wanted part of a partial read into its target.

    Args:
        read: The read, with `rows` and `part`.
        content: The bytes read: a 1-D uint8 tensor of `read.size_bytes` elements.
    """
    assert read.rows is not None
    assert read.part is not None
    rows = content.view(read.target.dtype).view(read.rows.sizes)
    with torch.no_grad():
        read.target.copy_(rows[read.part.slices(within=read.rows)])
