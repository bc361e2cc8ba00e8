"""Many tensors as a few flat ones, one for each dtype and device: what lets a collective run once for all of them."""

from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch
from torch import Tensor


def buckets(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The positions of `tensors` by dtype and device, in order of first appearance."""
    found: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for position, tensor in enumerate(tensors):
        found.setdefault((tensor.dtype, tensor.device), []).append(position)
    return list(found.values())


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of `tensors`, of one dtype and device, one after the other: shape (total,), memory of its own."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflat(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of `flat`: views of `buffer` in the shapes of `like`."""
    pieces = buffer.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def map_buckets(tensors: Sequence[Tensor], transfer: Callable[[list[int]], list[Tensor]]) -> Iterator[Tensor]:
    """Hand the positions of each bucket to `transfer`; the tensors it returns, in the order of `tensors`."""
    results: list[Tensor] = list(tensors)
    for positions in buckets(tensors):
        for position, result in zip(positions, transfer(positions), strict=True):
            results[position] = result
    return iter(results)


def as_bytes(buffer: Tensor) -> Tensor:
    """A contiguous tensor seen as bytes: gloo and NCCL move those, while each lacks some dtypes."""
    return buffer.view(-1).view(torch.uint8)


def stacked_leading(size: torch.Size, count: int) -> tuple[int, ...]:
    """The shape of `count` tensors of `size` along their first dimension; a zero-dim one counts as (1,)."""
    return (count * size[0], *size[1:]) if size else (count,)


def split_by_rank(row: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """What one rank sent: the beginning of its padded flat buffer, cut into tensors of `shapes`."""
    sizes = [prod(shape) for shape in shapes]
    pieces = row[: sum(sizes)].split(sizes)
    return [piece.view(tuple(shape)) for piece, shape in zip(pieces, shapes, strict=True)]
