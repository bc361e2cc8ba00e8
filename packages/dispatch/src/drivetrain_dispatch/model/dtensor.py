"""The part of a tensor that one rank has, where a model's tensors are divided among ranks (torch's DTensor)."""

import math
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

# Begin and end in each dim.
Box: TypeAlias = tuple[tuple[int, int], ...]


def is_divided(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def box_of(name: str, tensor: Tensor) -> Box:
    """Where this rank's part of a divided tensor lies in the whole. Works on the meta device.

    Args:
        name: What an error calls it.
        tensor: The DTensor.

    Raises:
        ValueError: It is divided in another way than by `Shard` and `Replicate`.
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
        step = -(-(end - begin) // divided.device_mesh.size(axis))  # as torch.chunk has it
        begin = min(end, begin + step * divided.device_mesh.get_local_rank(axis))
        box[placement.dim] = (begin, min(end, begin + step))
    here = tuple(divided.to_local().shape)
    if shape_of(tuple(box)) != here:
        raise ValueError(
            f"{name!r} is divided in another way than torch.chunk does: {here} of {tuple(tensor.shape)} are here"
        )
    return tuple(box)


def shape_of(box: Box) -> tuple[int, ...]:
    """The dims of a part."""
    return tuple(end - begin for begin, end in box)


def range_of(box: Box, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """The first element of a part and its end, where it lies in the whole in one piece; else None. Pure."""
    if not shape:
        return (0, 1)
    row = math.prod(shape[1:])
    whole_rows = all(bounds == (0, size) for bounds, size in zip(box[1:], shape[1:], strict=True))
    return (box[0][0] * row, box[0][1] * row) if whole_rows else None


def device_of(tensor: Tensor) -> torch.device:
    """Where a part that has no memory yet is to be."""
    divided: Any = tensor
    return torch.device(divided.device_mesh.device_type)


def divided_like(old: Tensor, part: Tensor, *, requires_grad: bool) -> nn.Parameter:
    """A parameter that is divided as another is, of this rank's part."""
    divided: Any = old
    whole = type(divided).from_local(
        part, divided.device_mesh, divided.placements, run_check=False, shape=old.shape, stride=old.stride()
    )
    return nn.Parameter(whole, requires_grad=requires_grad)


def put_part(old: Tensor, part: Tensor) -> None:
    """Write this rank's part into its memory, of which the engine that divided the tensor keeps views."""
    divided: Any = old
    with torch.no_grad():
        divided.to_local().copy_(part)
