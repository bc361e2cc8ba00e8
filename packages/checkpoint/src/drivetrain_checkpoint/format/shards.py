"""The shards of a tensor that this rank holds, and memory to read shards into."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from drivetrain_checkpoint.errors import StateError
from drivetrain_weights.held_parts import HeldBoxes, HeldRange
from drivetrain_weights.tensor_box import Box, box_of_dtensor, boxes_of_range, is_dtensor, overlap, whole


@dataclass(frozen=True, slots=True)
class Replicated:
    """A tensor with the same bits on all ranks; each rank may write a part of the tensor."""

    tensor: Tensor

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor."""
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        return self.tensor.dtype


class FlatShard(Protocol):
    """A tensor sharded as by ZeRO: each rank holds one contiguous range of the elements, in row-major order.

    Any object with these two attributes and `flat_range` qualifies.

    Attributes:
        shape: The shape of the whole tensor.
        dtype: The dtype of the elements.
    """

    shape: Sequence[int]
    dtype: torch.dtype

    def flat_range(self) -> tuple[int, Tensor]:
        """Return the index of this rank's first element, and its elements, of shape (n,); n may be 0."""
        ...


class BoxedShard(Protocol):
    """A tensor of which each rank holds some boxes, such as its heads of a fused projection.

    Any object with these two attributes and `held_boxes` qualifies. Ranks that hold one box hold the same bits.

    Attributes:
        shape: The shape of the whole tensor.
        dtype: The dtype of the elements.
    """

    shape: Sequence[int]
    dtype: torch.dtype

    def held_boxes(self) -> Sequence[tuple[Box, Tensor]]:
        """Return this rank's boxes, each with its elements in the shape of the box."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Proportional:
    """The part to load of a tensor that describes another tensor, such as one scale for every 256 elements.

    If the stored tensor has n elements, its elements from `start * n / of` to `stop * n / of` are read, flat. An
    element that lies only partly in this range is read too.

    Attributes:
        start: The index of this rank's first element in the other tensor, in row-major order.
        stop: The index after this rank's last element in the other tensor.
        of: The number of elements of the other tensor.
    """

    start: int
    stop: int
    of: int

    def range_of(self, size: int) -> tuple[int, int]:
        """Return the start and stop of the elements to read from a stored tensor of `size` elements."""
        return self.start * size // self.of, -(-self.stop * size // self.of)


# A tensor in a state, in any of its forms: a tensor, a DTensor, a `Replicated`, a `FlatShard` or a `BoxedShard`.
Leaf: TypeAlias = Any


@dataclass(frozen=True, slots=True, eq=False)
class TensorShard:
    """A box of a tensor, and its elements in the shape of the box."""

    box: Box
    data: Tensor


def is_flat_shard(leaf: Leaf) -> bool:
    """Return whether a leaf is a `FlatShard`."""
    return hasattr(leaf, "flat_range")


def is_boxed_shard(leaf: Leaf) -> bool:
    """Return whether a leaf is a `BoxedShard`."""
    return hasattr(leaf, "held_boxes")


def shards_of(leaf: Leaf, *, is_main: bool) -> tuple[TensorShard, ...]:
    """Return the shards of a tensor that this rank holds, without a copy.

    For a plain tensor, only rank 0 returns a shard, because the values may differ between ranks.
    """
    if isinstance(leaf, Replicated):
        return (TensorShard(whole(leaf.tensor.shape), leaf.tensor),)
    if is_flat_shard(leaf):
        start, elements = cast("FlatShard", leaf).flat_range()
        return tuple(_of_range(leaf.shape, start, elements))
    if is_boxed_shard(leaf):
        return tuple(
            TensorShard(box, data) for box, data in cast("BoxedShard", leaf).held_boxes() if data.numel()
        )
    if is_dtensor(leaf):
        try:
            box = box_of_dtensor(leaf)
        except ValueError as error:
            raise StateError(str(error)) from error
        return (TensorShard(box, leaf.to_local()),) if box.num_elements else ()
    return (TensorShard(whole(leaf.shape), leaf),) if is_main else ()


def piece_of(shards: Sequence[TensorShard], box: Box) -> Tensor:
    """Return the elements of a box that lies inside one of the shards, as a view. An empty box needs no shard."""
    if not box.num_elements:
        return torch.empty(box.sizes, dtype=torch.uint8)
    for shard in shards:
        if shard.box == box:
            return shard.data
        if overlap(shard.box, box) == box:
            return shard.data[box.slices(within=shard.box)]
    raise AssertionError(f"no shard holds {box}")


@dataclass(frozen=True, slots=True, eq=False)
class ReadTarget:
    """The memory to read a tensor into."""

    value: Leaf  # loaded once the shards are filled: a tensor, a DTensor, a `HeldRange` or `HeldBoxes`
    shards: tuple[TensorShard, ...]  # views of the value's memory, each contiguous and on the CPU


def make_target(box: Box, dtype: torch.dtype, like: Leaf | None) -> ReadTarget:
    """Allocate CPU memory for a tensor.

    If `like` is a `Proportional`, or is sharded and has the tensor's shape, the memory holds this rank's shard.
    Otherwise it holds the whole tensor.
    """
    shape = box.sizes
    if isinstance(like, Proportional):
        start, stop = like.range_of(prod(shape))
        part = HeldRange(torch.Size(shape), start, torch.empty(stop - start, dtype=dtype))
        return ReadTarget(part, tuple(_of_range(shape, start, part.elements)))
    if like is not None and tuple(like.shape) == tuple(shape):
        if is_flat_shard(like):
            start, elements = cast("FlatShard", like).flat_range()
            part = HeldRange(torch.Size(shape), start, torch.empty(elements.numel(), dtype=dtype))
            return ReadTarget(part, tuple(_of_range(shape, start, part.elements)))
        if is_boxed_shard(like):
            own = (held for held, _ in cast("BoxedShard", like).held_boxes())
            boxes = tuple((each, torch.empty(each.sizes, dtype=dtype)) for each in own)
            shards = tuple(TensorShard(each, data) for each, data in boxes if data.numel())
            return ReadTarget(HeldBoxes(torch.Size(shape), dtype, boxes), shards)
        if is_dtensor(like):
            value = torch.empty_like(like.detach(), dtype=dtype, device="cpu")
            return ReadTarget(value, shards_of(value, is_main=False))
    tensor = torch.empty(shape, dtype=dtype)
    return ReadTarget(tensor, (TensorShard(box, tensor),))


def _of_range(shape: Sequence[int], start: int, elements: Tensor) -> list[TensorShard]:
    """Return a range of elements as boxes, which are views of `elements`."""
    shards: list[TensorShard] = []
    at = 0
    for box in boxes_of_range(shape, start, start + elements.numel()):
        shards.append(TensorShard(box, elements[at : at + prod(box.sizes)].view(box.sizes)))
        at += box.num_elements
    return shards
