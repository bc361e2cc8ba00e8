"""Many tensors as a few flat ones, one for each dtype and device: what lets a collective run once for all of them.

A bucket is a list of runs: the positions of the tensors of one shape. A run is packed and cut by one call of torch
each, which is what makes many small tensors cheap.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from math import prod

import torch
from torch import Tensor

Bucket = list[list[int]]


def buckets(tensors: Sequence[Tensor]) -> list[Bucket]:
    """The positions of `tensors` by dtype and device, then by shape, each in order of first appearance."""
    found: dict[tuple[torch.dtype, torch.device], dict[torch.Size, list[int]]] = {}
    for position, tensor in enumerate(tensors):
        found.setdefault((tensor.dtype, tensor.device), {}).setdefault(tensor.shape, []).append(position)
    return [list(by_shape.values()) for by_shape in found.values()]


def map_buckets(
    tensors: Sequence[Tensor], transfer: Callable[[Bucket], Iterable[Tensor]]
) -> Iterator[Tensor]:
    """Hand each bucket to `transfer`, which returns a tensor for each of its positions; all, in their order."""
    results: list[Tensor] = list(tensors)
    for bucket in buckets(tensors):
        for position, result in zip(chain.from_iterable(bucket), transfer(bucket), strict=True):
            results[position] = result
    return iter(results)


def pack(tensors: Sequence[Tensor], bucket: Bucket) -> Tensor:
    """The elements of a bucket's tensors, run by run: shape (total,), in memory of its own."""
    runs = [torch.stack([tensors[position] for position in run]).view(-1) for run in bucket]
    return runs[0] if len(runs) == 1 else torch.cat(runs)


def unpack(buffer: Tensor, tensors: Sequence[Tensor], bucket: Bucket) -> Iterator[Tensor]:
    """The inverse of `pack`: views of `buffer` in the shapes of the bucket's tensors."""
    pieces = buffer.split([len(run) * tensors[run[0]].numel() for run in bucket])
    for piece, run in zip(pieces, bucket, strict=True):
        yield from piece.view(len(run), *tensors[run[0]].shape).unbind()


def unpack_rows(rows: Tensor, tensors: Sequence[Tensor], bucket: Bucket) -> Iterator[Tensor]:
    """What all ranks packed, a row of `rows` for each, as tensors concatenated along their first dimension.

    A tensor of shape (n, ...) becomes (world_size * n, ...), one of shape () becomes (world_size,).
    """
    pieces = rows.split([len(run) * tensors[run[0]].numel() for run in bucket], dim=1)
    for piece, run in zip(pieces, bucket, strict=True):
        shape = tensors[run[0]].shape
        by_tensor = piece.view(len(rows), len(run), *shape).transpose(0, 1)
        yield from by_tensor.reshape(len(run), *stacked(shape, len(rows))).unbind()


def stacked(shape: torch.Size, count: int) -> tuple[int, ...]:
    """The shape of `count` tensors of `shape` along their first dimension; a zero-dim one counts as (1,)."""
    return (count * shape[0], *shape[1:]) if shape else (count,)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of `tensors`, one after the other: shape (total,), in memory of its own."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def cut(row: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The beginning of a flat buffer as tensors of `shapes`; the rest is padding."""
    sizes = [prod(shape) for shape in shapes]
    pieces = row[: sum(sizes)].split(sizes)
    return [piece.view(tuple(shape)) for piece, shape in zip(pieces, shapes, strict=True)]


def as_bytes(buffer: Tensor) -> Tensor:
    """A contiguous tensor seen as bytes: gloo and NCCL move those, while each lacks some dtypes."""
    return buffer.view(-1).view(torch.uint8)
