"""What this rank holds of a tensor that is divided among ranks, and room for what is to be read of one."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from drivetrain_checkpoint.errors import StateError
from drivetrain_checkpoint.format.boxes import Box, boxes_of_range, overlap, whole


@dataclass(frozen=True, slots=True)
class Replica:
    """A tensor that is the same, bit by bit, on all ranks, so that each of them may write a part of it."""

    tensor: Tensor

    @property
    def shape(self) -> torch.Size:
        """The tensor's."""
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's."""
        return self.tensor.dtype


class FlatShard(Protocol):
    """A tensor of which each rank holds one run of elements in row-major order, as ZeRO divides it.

    Anything with these three will do.

    Attributes:
        shape: That of the whole.
        dtype: Of its elements.
    """

    shape: Sequence[int]
    dtype: torch.dtype

    def flat_range(self) -> tuple[int, Tensor]:
        """The index of this rank's first element, and its elements, of shape (n,); n may be 0."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class FlatPart:
    """This rank's run of elements of a tensor that was read, to be put where a `FlatShard` has its own.

    Attributes:
        shape: That of the whole.
        start: The index of the first element, in row-major order.
        elements: Shape (n,), on the CPU.
    """

    shape: torch.Size
    start: int
    elements: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        return self.elements.dtype

    def flat_range(self) -> tuple[int, Tensor]:
        """Where it begins, and its elements."""
        return self.start, self.elements


# What may stand for a tensor in a state: a tensor, a DTensor, a `Replica` or a `FlatShard`.
Leaf: TypeAlias = Any


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A box of a tensor and its elements, shaped as the box."""

    box: Box
    data: Tensor


def is_flat_shard(leaf: Leaf) -> bool:
    """Whether it holds a run of elements."""
    return hasattr(leaf, "flat_range")


def is_dtensor(leaf: Leaf) -> bool:
    """Whether it is torch's DTensor, whose import takes as long as torch's."""
    return hasattr(leaf, "to_local")


def shards_of(leaf: Leaf, *, is_main: bool) -> tuple[Shard, ...]:
    """What this rank holds of a tensor, without a copy.

    A plain tensor is rank 0's: others may have other values.

    Raises:
        StateError: It is divided in a way that has no boxes.
    """
    if isinstance(leaf, Replica):
        return (Shard(whole(leaf.tensor.shape), leaf.tensor),)
    if is_flat_shard(leaf):
        start, elements = cast("FlatShard", leaf).flat_range()
        return tuple(_of_range(leaf.shape, start, elements))
    if is_dtensor(leaf):
        box, local = box_of_dtensor(leaf), leaf.to_local()
        if tuple(local.shape) != box.sizes:
            raise StateError(
                f"a DTensor of shape {tuple(leaf.shape)} placed as {leaf.placements} has {tuple(local.shape)} on "
                f"this rank, where torch's even division gives {box.sizes}: redistribute() or full_tensor() it"
            )
        return (Shard(box, local),) if box.num_elements else ()
    return (Shard(whole(leaf.shape), leaf),) if is_main else ()


def piece_of(shards: Sequence[Shard], box: Box) -> Tensor:
    """The elements of a box that lies in one of the shards: a view. An empty box needs none."""
    if not box.num_elements:
        return torch.empty(box.sizes, dtype=torch.uint8)
    for shard in shards:
        if shard.box == box:
            return shard.data
        if overlap(shard.box, box) == box:
            return shard.data[box.slices(within=shard.box)]
    raise AssertionError(f"no shard holds {box}")


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """Memory for what is to be read of a tensor.

    Attributes:
        value: What stands for the tensor once the shards are filled: a tensor, a DTensor, or a `FlatPart`.
        shards: Views of its memory, each contiguous and on the CPU.
    """

    value: Leaf
    shards: tuple[Shard, ...]


def make_room(shape: Sequence[int], dtype: torch.dtype, like: Leaf | None) -> Room:
    """Room on the CPU for a tensor: for this rank's part if `like` is divided and of its shape, else for all."""
    if like is not None and tuple(like.shape) == tuple(shape):
        if is_flat_shard(like):
            start, elements = cast("FlatShard", like).flat_range()
            part = FlatPart(torch.Size(shape), start, torch.empty(elements.numel(), dtype=dtype))
            return Room(part, tuple(_of_range(shape, start, part.elements)))
        if is_dtensor(like):
            value = torch.empty_like(like.detach(), dtype=dtype, device="cpu")
            return Room(value, shards_of(value, is_main=False))
    tensor = torch.empty(tuple(shape), dtype=dtype)
    return Room(tensor, (Shard(whole(shape), tensor),))


def box_of_dtensor(dtensor: Leaf) -> Box:
    """The box that this rank holds.

    Raises:
        StateError: It is divided in another way than `Shard` and `Replicate`.
    """
    offsets, sizes = [0] * len(dtensor.shape), list(dtensor.shape)
    for axis, placement in enumerate(dtensor.placements):
        if placement.is_replicate():
            continue
        if not type(placement).__name__ == "Shard":
            raise StateError(
                f"a DTensor of shape {tuple(dtensor.shape)} is placed as {placement}, which gives no rank a box: "
                "redistribute() it to Shard or Replicate, or give its full_tensor()"
            )
        dim = placement.dim % len(sizes)
        size = -(-sizes[dim] // dtensor.device_mesh.size(axis))  # as torch.chunk divides
        start = min(size * dtensor.device_mesh.get_local_rank(axis), sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(size, sizes[dim] - start)
    return Box(offsets=tuple(offsets), sizes=tuple(sizes))


def _of_range(shape: Sequence[int], start: int, elements: Tensor) -> list[Shard]:
    """The boxes of a run of elements, as views of it."""
    shards: list[Shard] = []
    at = 0
    for box in boxes_of_range(shape, start, start + elements.numel()):
        shards.append(Shard(box, elements[at : at + prod(box.sizes)].view(box.sizes)))
        at += box.num_elements
    return shards
