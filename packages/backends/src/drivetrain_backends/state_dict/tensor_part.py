"""Tensors of divided layers in a state: the part that this rank holds, the whole, and the part to load."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain_backends.state_dict.dtensor import local, sharded_like, whole_of
from drivetrain_parallel import Cut, part_of
from drivetrain_state.rank_group import RankGroup
from drivetrain_weights import Box, box_of_dtensor
from drivetrain_weights.tensor_box import is_dtensor, overlap, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDivision:
    """The division of a tensor, by a cut of one dimension among the ranks of a view, such as `tensor` or `expert`."""

    cut: Cut
    ranks: RankGroup

    def own(self, whole_tensor: Tensor) -> Tensor:
        """Return a copy of what this rank holds of a whole tensor."""
        return part_of(whole_tensor, self.cut, self.ranks.index, self.ranks.size)


class TensorPart:
    """A tensor of a state, of which this rank holds what a `TensorDivision` gives it; FSDP may divide that further.

    Attributes:
        shape: The shape of the whole tensor.
        dtype: The dtype of the elements.
    """

    def __init__(self, value: Tensor, division: TensorDivision) -> None:
        shape = list(value.shape)
        shape[division.cut.dim] = division.cut.num_elements
        self.shape, self.dtype = torch.Size(shape), value.dtype
        self._value, self._division = value, division

    def held_boxes(self) -> list[tuple[Box, Tensor]]:
        """Return the boxes that this rank holds of the whole tensor, each with its elements, which are not copied."""
        here = box_of_dtensor(self._value) if is_dtensor(self._value) else whole(self._value.shape)
        return [
            (box, local(self._value)[inner.slices(within=here)])
            for box, piece in _boxes(self.shape, self._division)
            if (inner := overlap(piece, here)) is not None
            for box in [_moved(inner, by=box, from_=piece)]
        ]

    def full_tensor(self) -> Tensor:
        """Return the whole tensor. Called on all ranks."""
        device = torch.device(self._value.device_mesh.device_type) if is_dtensor(self._value) else None
        return join_parts(whole_of(self._value, device or self._value.device), self._division)


def join_parts(part: Tensor, division: TensorDivision) -> Tensor:
    """Return the whole tensor of the parts that ranks hold. Called on all of them."""
    cut, ranks = division.cut, division.ranks
    sizes = cut.sizes(ranks.size)
    shape = list(part.shape)
    shape[cut.dim] = max(sizes)
    padded = part.new_zeros(shape)
    padded.narrow(cut.dim, 0, part.shape[cut.dim]).copy_(part)
    found = [torch.empty_like(padded) for _ in sizes]
    # As bytes: gloo supports neither booleans nor fp8.
    dist.all_gather(
        [one.view(-1).view(torch.uint8) for one in found],
        padded.view(-1).view(torch.uint8),
        group=ranks.process_group,
    )
    shape[cut.dim] = cut.num_elements
    joined = part.new_empty(shape)
    for rank, one in enumerate(found):
        at = 0
        for start, stop in cut.ranges(rank, ranks.size):
            joined.narrow(cut.dim, start, stop - start).copy_(one.narrow(cut.dim, at, stop - start))
            at += stop - start
    return joined


def localized(value: Any, division: TensorDivision, like: Tensor) -> Any:
    """Return this rank's part of a saved tensor, which is whole or divided in any way. Called on all ranks.

    Args:
        value: The saved value.
        division: The division of the tensor.
        like: The parameter that the tensor belongs to, as this rank holds it.

    Returns:
        The part that `division` gives this rank: sharded like `like` if it was read so, else in full.
    """
    own = TensorPart(like, division)
    if tuple(value.shape) != tuple(own.shape):  # such as a step count
        return value
    held = value.held_boxes() if hasattr(value, "held_boxes") else None
    if held is not None and [box for box, _ in held] == [box for box, _ in own.held_boxes()]:
        empty = local(like).new_empty(0, dtype=value.dtype)
        shard = (
            torch.cat([piece for _, piece in held], division.cut.dim)
            if held
            else empty.view(local(like).shape)
        )
        return sharded_like(shard, like) if is_dtensor(like) else shard
    full = value.full_tensor() if hasattr(value, "full_tensor") else value
    return division.own(full)


def _boxes(shape: Sequence[int], division: TensorDivision) -> list[tuple[Box, Box]]:
    """Return the box of each piece that this rank holds, in the whole tensor and in its part."""
    cut, ranks = division.cut, division.ranks
    found: list[tuple[Box, Box]] = []
    at = 0
    for start, stop in cut.ranges(ranks.index, ranks.size):
        sizes = tuple(stop - start if dim == cut.dim else size for dim, size in enumerate(shape))
        offsets = [
            tuple(first if dim == cut.dim else 0 for dim in range(len(shape))) for first in (start, at)
        ]
        found.append((Box(offsets[0], sizes), Box(offsets[1], sizes)))
        at += stop - start
    return found


def _moved(box: Box, *, by: Box, from_: Box) -> Box:
    """Return a box that lies in the piece `from_` of a part as it lies in the piece `by` of the whole tensor."""
    offsets = (a - b + c for a, b, c in zip(box.offsets, from_.offsets, by.offsets, strict=True))
    return Box(tuple(offsets), box.sizes)
