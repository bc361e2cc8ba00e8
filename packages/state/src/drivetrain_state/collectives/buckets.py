"""Pack many tensors into one flat buffer per dtype and device, so that one collective moves them all.

A bucket is a list of runs. A run lists the positions of the tensors of one shape, which one torch call packs and
another unpacks; this keeps many small tensors cheap.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from math import prod

import torch
from torch import Tensor

Bucket = list[list[int]]


def buckets(tensors: Sequence[Tensor]) -> list[Bucket]:
    """Group the positions of `tensors` by dtype and device, then by shape, each in order of first appearance."""
    found: dict[tuple[torch.dtype, torch.device], dict[torch.Size, list[int]]] = {}
    for position, tensor in enumerate(tensors):
        found.setdefault((tensor.dtype, tensor.device), {}).setdefault(tensor.shape, []).append(position)
    return [list(by_shape.values()) for by_shape in found.values()]


def map_buckets(
    tensors: Sequence[Tensor], transfer: Callable[[Bucket], Iterable[Tensor]]
) -> Iterator[Tensor]:
    """Apply `transfer`, which returns one tensor per position, to each bucket; iterate over all results in order."""
    results: list[Tensor] = list(tensors)
    for bucket in buckets(tensors):
        for position, result in zip(chain.from_iterable(bucket), transfer(bucket), strict=True):
            results[position] = result
    return iter(results)


def pack(tensors: Sequence[Tensor], bucket: Bucket) -> Tensor:
    """Copy the elements of a bucket's tensors, run by run, into a new tensor of shape (total,)."""
    runs = [torch.stack([tensors[position] for position in run]).view(-1) for run in bucket]
    return runs[0] if len(runs) == 1 else torch.cat(runs)


def unpack(buffer: Tensor, tensors: Sequence[Tensor], bucket: Bucket) -> Iterator[Tensor]:
    """Yield views of `buffer` in the shapes of the bucket's tensors: the inverse of `pack`."""
    pieces = buffer.split([len(run) * tensors[run[0]].numel() for run in bucket])
    for piece, run in zip(pieces, bucket, strict=True):
        yield from piece.view(len(run), *tensors[run[0]].shape).unbind()


def unpack_rows(rows: Tensor, tensors: Sequence[Tensor], bucket: Bucket) -> Iterator[Tensor]:
    """Yield the tensors that all ranks packed, concatenated over ranks along their first dimension.

    `rows` has shape (world_size, total), one packed buffer per rank.

    A tensor of shape (n, ...) becomes (world_size * n, ...); one of shape () becomes (world_size,).
    """
    pieces = rows.split([len(run) * tensors[run[0]].numel() for run in bucket], dim=1)
    for piece, run in zip(pieces, bucket, strict=True):
        shape = tensors[run[0]].shape
        by_tensor = piece.view(len(rows), len(run), *shape).transpose(0, 1)
        yield from by_tensor.reshape(len(run), *stacked(shape, len(rows))).unbind()


def stacked(shape: torch.Size, count: int) -> tuple[int, ...]:
    """Return the shape of `count` tensors of `shape` concatenated along dimension 0; () counts as (1,)."""
    return (count * shape[0], *shape[1:]) if shape else (count,)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate the elements of `tensors` into a new tensor of shape (total,)."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def cut(row: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return views of a flat buffer in the given `shapes`; elements beyond them are padding."""
    sizes = [prod(shape) for shape in shapes]
    pieces = row[: sum(sizes)].split(sizes)
    return [piece.view(tuple(shape)) for piece, shape in zip(pieces, shapes, strict=True)]


def as_bytes(buffer: Tensor) -> Tensor:
    """View a contiguous tensor as bytes, which gloo and NCCL both transfer, while each lacks some dtypes."""
    return buffer.view(-1).view(torch.uint8)
