"""Conversions between a sharded tensor, its local shard and the full tensor.

This module does not import DTensor, because models without shards need it too: the import takes as long as torch's.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain_state import Context
from drivetrain_state.mesh import View
from drivetrain_weights import box_of_dtensor
from drivetrain_weights.tensor_box import is_dtensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard; return a tensor that is not sharded unchanged."""
    return plain_values(tensor.to_local()) if is_dtensor(tensor) else tensor


def plain_values(tensor: Any) -> Tensor:
    """Return the plain tensor inside a tensor whose class only sets how its values are gathered, such as in fp8.

    If the values inside have another shape or dtype, as in a quantised tensor, return the tensor unchanged.
    """
    if type(tensor) is Tensor or not hasattr(tensor, "__tensor_flatten__"):
        return tensor
    names, _ = tensor.__tensor_flatten__()
    inner = getattr(tensor, names[0])
    return inner if inner.shape == tensor.shape and inner.dtype == tensor.dtype else tensor


def plain_dtensor(tensor: Any) -> Any:
    """Return a sharded tensor as a plain DTensor, which shares the values of the shard."""
    shard = tensor.to_local()
    plain = plain_values(shard)
    if plain is shard:
        return tensor
    return sharded_like(plain, tensor)


def sharded_like(shard: Tensor, like: Any) -> Any:
    """Return this rank's shard as a tensor that is sharded like `like`, on the device of the mesh."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def own_part(whole: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of a full tensor, sharded like `like`: a view, without communication."""
    return whole[box_of_dtensor(like).slices()] if is_dtensor(like) else whole


def whole_of(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the full tensor on `device`. Called on all ranks."""
    tensor = tensor.detach()
    if not is_dtensor(tensor):
        return tensor
    if tensor.to_local().device.type != device.type:  # offloaded; the mesh communicates on its own device
        return sharded_like(tensor.to_local().to(device), tensor).full_tensor()
    return tensor.full_tensor()


def same_division(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are sharded over the same ranks in the same way."""
    return (
        is_dtensor(one)
        and is_dtensor(other)
        and one.placements == other.placements
        and one.device_mesh == other.device_mesh
    )


@torch.no_grad()
def write(target: Tensor, value: Tensor, device: torch.device) -> None:
    """Copy a value, full or sharded in any way, into a tensor. Called on all ranks."""
    if same_division(target, value):
        local(target).copy_(local(value))
        return
    local(target).copy_(own_part(whole_of(value, device), target))


@torch.no_grad()
def write_from_first(target: Any, value: Tensor | None, context: Context) -> None:
    """Copy rank 0's value into a tensor; each rank copies its shard. Called on all ranks; only rank 0 passes a value.

    Ranks other than 0 hold only this tensor in full.
    """
    whole = torch.empty(target.shape, dtype=target.dtype, device=context.device)
    if value is not None:
        whole.copy_(value)
    broadcast_from_first(whole, context, over="world")
    if hasattr(target, "held_boxes"):
        for box, elements in target.held_boxes():
            elements.copy_(whole[box.slices()])
        return
    local(target).copy_(own_part(whole, target))


def broadcast_from_first(tensor: Tensor, context: Context, *, over: View = "counts") -> None:
    """Broadcast the values of the first rank of a view, in place: by default of those that hold the same part.

    The tensor is contiguous. Called on all ranks.
    """
    ranks = context.ranks(over)
    if (group := ranks.process_group) is not None:
        # As bytes: gloo supports neither booleans nor fp8.
        dist.broadcast(tensor.view(-1).view(torch.uint8), src=ranks.ranks[0], group=group)


@torch.no_grad()
def broadcast_parts(parts: Iterable[Tensor], context: Context, *, over: View = "counts") -> None:
    """Broadcast the values of a view's first rank of tensors, such as those inside a packed weight, in place.

    Called on all ranks; see `broadcast_from_first`.
    """
    for part in parts:
        values = part.contiguous()
        broadcast_from_first(values, context, over=over)
        if values is not part:
            part.copy_(values)
