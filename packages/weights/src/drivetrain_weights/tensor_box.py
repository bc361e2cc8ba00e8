"""Boxes, which are the parts of tensors that ranks hold, and their intersections.

A DTensor's shard is a box. A ZeRO shard is a range of the flattened tensor, which may cut rows: a few boxes.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Box(NamedTuple):
    """A rectangular part of a tensor: the index of its first element and the number of elements, per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """The number of elements; 1 without dimensions."""
        return prod(self.sizes)

    def slices(self, *, within: "Box | None" = None) -> tuple[slice, ...]:
        """Return the slices that select the box from the tensor, or from a box around it."""
        starts = self.offsets if within is None else map(int.__sub__, self.offsets, within.offsets)
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))

    def flat_range(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Return the box as a range (start, stop) of the flat tensor; None if the box is not contiguous there."""
        if self.sizes[1:] != tuple(shape[1:]):
            return None
        row = prod(shape[1:])
        return (self.offsets[0] * row, (self.offsets[0] + self.sizes[0]) * row) if shape else (0, 1)

    def cut(self, num_elements: int) -> "Iterator[Box]":
        """Yield pieces of at most `num_elements` elements, cut along the first dimension longer than 1.

        A single index of that dimension is never cut, even if it has more than `num_elements` elements.
        """
        axis = next((axis for axis, size in enumerate(self.sizes) if size > 1), None)
        if axis is None or self.num_elements <= num_elements:
            yield self
            return
        step = max(1, num_elements * self.sizes[axis] // self.num_elements)
        for start in range(0, self.sizes[axis], step):
            offsets, sizes = list(self.offsets), list(self.sizes)
            offsets[axis] += start
            sizes[axis] = min(step, sizes[axis] - start)
            yield Box(tuple(offsets), tuple(sizes))


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return Box(offsets=(0,) * len(shape), sizes=tuple(shape))


def is_dtensor(value: object) -> TypeGuard["DTensor"]:
    """Return whether a value is a DTensor. DTensor is not imported, as that takes as long as importing torch."""
    return hasattr(value, "to_local") and hasattr(value, "placements")


def box_of_dtensor(dtensor: Any, *, name: str = "a DTensor") -> Box:
    """Return the box of a DTensor that this rank holds. Works on the meta device.

    Each dimension is cut by the outermost axis of the mesh first, or, where FSDP divides what tensor parallelism has
    divided (torch's `_StridedShard`), by the innermost.

    Raises:
        ValueError: The tensor has other placements, or is not cut as `torch.chunk` cuts.
    """
    offsets, sizes = [0] * len(dtensor.shape), list(dtensor.shape)
    mesh, placements = dtensor.device_mesh, list[Any](dtensor.placements)
    kinds = [type(placement).__name__ for placement in placements]
    axes, innermost_first = range(len(placements)), "_StridedShard" in kinds
    for axis in reversed(axes) if innermost_first else axes:
        placement, kind = placements[axis], kinds[axis]
        if placement.is_replicate():
            continue
        dims = [getattr(each, "dim", None) for each in placements]
        num_inner = prod(mesh.size(i) for i in axes[axis + 1 :] if dims[i] == dims[axis])
        cut_before = placement.split_factor if kind == "_StridedShard" else 1
        # torch's other subclasses of Shard cut in other ways.
        if kind not in ("Shard", "_StridedShard") or (innermost_first and cut_before != num_inner):
            raise ValueError(
                f"{name} of shape {tuple(dtensor.shape)} is placed as {placement}, which gives no rank a box: "
                "redistribute() it to Shard or Replicate, or give its full_tensor()"
            )
        dim = placement.dim % len(sizes)
        step = -(-sizes[dim] // mesh.size(axis))  # torch.chunk's size of a chunk
        start = min(step * mesh.get_local_rank(axis), sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(step, sizes[dim] - start)
    box, here = Box(offsets=tuple(offsets), sizes=tuple(sizes)), tuple(dtensor.to_local().shape)
    if here != box.sizes:
        raise ValueError(
            f"{name} of shape {tuple(dtensor.shape)} placed as {dtensor.placements} has {here} on this rank, where "
            f"torch's even division gives {box.sizes}: redistribute() or full_tensor() it"
        )
    return box


def overlap(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes of the same tensor, or None if they are disjoint."""
    offsets: list[int] = []
    sizes: list[int] = []
    for a, n, b, m in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True):
        start, stop = max(a, b), min(a + n, b + m)
        if start >= stop:
            return None
        offsets.append(start)
        sizes.append(stop - start)
    return Box(offsets=tuple(offsets), sizes=tuple(sizes))


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that make up a range of a tensor's elements, both in row-major order.

    There are at most `2 * ndim - 1` boxes: cut rows at either end for each dimension, and full rows between.
    """
    if start >= stop:
        return
    if not shape:
        yield Box(offsets=(), sizes=())
        return
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and (start % row or stop % row):
        yield from _in_row(shape, first, start - first * row, stop - first * row)
        return
    if start % row:
        yield from _in_row(shape, first, start % row, row)
        first += 1
    if stop % row:
        last -= 1
    if first <= last:
        rest = tuple(shape[1:])
        yield Box(offsets=(first, *(0 for _ in rest)), sizes=(last - first + 1, *rest))
    if stop % row:
        yield from _in_row(shape, last + 1, 0, stop % row)


def _in_row(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[Box]:
    for box in boxes_of_range(shape[1:], start, stop):
        yield Box(offsets=(index, *box.offsets), sizes=(1, *box.sizes))
