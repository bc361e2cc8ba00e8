"""Parameters that are sharded over ranks (torch's DTensor), of which each rank loads its shard."""

from typing import Any

import torch
from torch import Tensor, nn


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
