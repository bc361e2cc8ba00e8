"""Pack many tensors into one flat buffer per dtype and device, so that one collective moves them all.

A bucket is a list of runs. A run lists the positions of the tensors of one shape. One torch call packs a run and
another unpacks it, which keeps many small tensors cheap.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby
from math import prod
from operator import attrgetter

import torch
from torch import Tensor

Bucket = list[list[int]]

_dtype_device_shape = attrgetter("dtype", "device", "shape")


def buckets(tensors: Sequence[Tensor]) -> list[Bucket]:
    """Group the positions of `tensors` by dtype and device, then by shape, each in order of first appearance."""
    kinds = list(map(_dtype_device_shape, tensors))
    found: dict[tuple[torch.dtype, torch.device], dict[torch.Size, list[int]]] = {}
    # Neighbours are mostly alike, and are grouped without a step of the interpreter for each.
    for (dtype, device, shape), run in groupby(range(len(kinds)), kinds.__getitem__):
        found.setdefault((dtype, device), {}).setdefault(shape, []).extend(run)
    return [list(by_shape.values()) for by_shape in found.values()]


def map_buckets(
    tensors: Sequence[Tensor], transfer: Callable[[Bucket], Iterable[Tensor]]
) -> Iterator[Tensor]:
    """Apply `transfer`, which returns one tensor per position, to each bucket; iterate over all results in order."""
    found = buckets(tensors)
    if len(found) == 1 and len(found[0]) == 1:
        return iter(transfer(found[0]))
    results: list[Tensor] = list(tensors)
    for bucket in found:
        for position, result in zip(chain.from_iterable(bucket), transfer(bucket), strict=True):
            results[position] = result
    return iter(results)


def pack(tensors: Sequence[Tensor], bucket: Bucket) -> Tensor:
    """Copy the elements of a bucket's tensors, run by run, into a new tensor of shape (total,)."""
    runs = [torch.stack([tensors[position] for position in run]).view(-1) for run in bucket]
    return runs[0] if len(runs) == 1 else torch.cat(runs)


def unpack(buffer: Tensor, tensors: Sequence[Tensor], bucket: Bucket) -> Iterator[Tensor]:
    """Yield views of `buffer` in the shapes of the bucket's tensors: the inverse of `pack`."""
    for piece, run in _pieces(buffer, tensors, bucket):
        yield from piece.view(len(run), *tensors[run[0]].shape).unbind()


def unpack_rows(rows: Tensor, tensors: Sequence[Tensor], bucket: Bucket) -> Iterator[Tensor]:
    """Yield the tensors that all ranks packed, concatenated over ranks, from buffers of shape (world_size, total).

    A tensor of shape (n, ...) becomes (world_size * n, ...); one of shape () becomes (world_size,).
    """
    num_ranks = rows.shape[0]
    for piece, run in _pieces(rows, tensors, bucket):
        shape = tensors[run[0]].shape
        by_tensor = piece.view(num_ranks, len(run), *shape).transpose(0, 1)
        yield from by_tensor.reshape(len(run), *stacked(shape, num_ranks)).unbind()


def _pieces(buffer: Tensor, tensors: Sequence[Tensor], bucket: Bucket) -> Iterable[tuple[Tensor, list[int]]]:
    if len(bucket) == 1:
        return [(buffer, bucket[0])]
    sizes = [len(run) * tensors[run[0]].numel() for run in bucket]
    return zip(buffer.split(sizes, dim=-1), bucket, strict=True)


def stacked(shape: torch.Size, count: int) -> tuple[int, ...]:
    """Return the shape of `count` tensors of `shape` concatenated along dimension 0; () counts as (1,)."""
    return (count * shape[0], *shape[1:]) if shape else (count,)


def cut(row: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return views of a flat buffer in the given `shapes`; elements beyond them are padding."""
    sizes = [prod(shape) for shape in shapes]
    pieces = row[: sum(sizes)].split(sizes)
    return [piece.view(tuple(shape)) for piece, shape in zip(pieces, shapes, strict=True)]


def as_bytes(buffer: Tensor) -> Tensor:
    """View a flat buffer as bytes, which both gloo and NCCL can transfer; each of them lacks some dtypes."""
    return buffer.view(torch.uint8)
