"""The local shard of a tensor, in models whose tensors are sharded over ranks (torch's DTensor)."""

import math
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

# The start and end of a shard in each dim.
Box: TypeAlias = tuple[tuple[int, int], ...]


def is_divided(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def box_of(name: str, tensor: Tensor) -> Box:
    """Return the box of this rank's shard in the global tensor. Works on the meta device.

    Args:
        name: The tensor's name for error messages.
        tensor: The DTensor to inspect.

    Raises:
        ValueError: The tensor has placements other than `Shard` and `Replicate`, or is not cut as `torch.chunk` cuts.
    """
    divided: Any = tensor
    box = [(0, size) for size in tensor.shape]
    for axis, placement in enumerate(divided.placements):
        kind = type(placement).__name__
        if kind == "Replicate":
            continue
        if kind != "Shard":
            raise ValueError(f"{name!r} is divided by {placement}: must be by Shard or Replicate alone")
        begin, end = box[placement.dim]
        step = -(-(end - begin) // divided.device_mesh.size(axis))  # torch.chunk's size of a chunk
        begin = min(end, begin + step * divided.device_mesh.get_local_rank(axis))
        box[placement.dim] = (begin, min(end, begin + step))
    here = tuple(divided.to_local().shape)
    if shape_of(tuple(box)) != here:
        raise ValueError(
            f"{name!r} is divided in another way than torch.chunk does: {here} of {tuple(tensor.shape)} are here"
        )
    return tuple(box)


def shape_of(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(end - begin for begin, end in box)


def range_of(box: Box, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the range of a box's elements in the flat tensor; None if the box is not contiguous there. Pure."""
    if not shape:
        return (0, 1)
    row = math.prod(shape[1:])
    whole_rows = all(bounds == (0, size) for bounds, size in zip(box[1:], shape[1:], strict=True))
    return (box[0][0] * row, box[0][1] * row) if whole_rows else None


def device_of(tensor: Tensor) -> torch.device:
    """Return the device on which a DTensor's shard will be allocated."""
    divided: Any = tensor
    return torch.device(divided.device_mesh.device_type)


def divided_like(old: Tensor, part: Tensor, *, requires_grad: bool) -> nn.Parameter:
    """Return a parameter made of this rank's shard, with the device mesh and placements of another DTensor."""
    divided: Any = old
    whole = type(divided).from_local(
        part, divided.device_mesh, divided.placements, run_check=False, shape=old.shape, stride=old.stride()
    )
    return nn.Parameter(whole, requires_grad=requires_grad)


def put_part(old: Tensor, part: Tensor) -> None:
    """Write this rank's shard in place, since the engine that sharded the tensor keeps views of its memory."""
    divided: Any = old
    with torch.no_grad():
        divided.to_local().copy_(part)
