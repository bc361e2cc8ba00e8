"""The global norm of gradients that may be sharded or full."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from drivetrain_backends.gradients.multi_tensor import multiply_by_device, norms
from drivetrain_backends.state_dict.dtensor import local


@torch.no_grad()  # with grad mode on, taking the local shard would be an autograd operation
def global_norm(gradients: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the norm of all gradients as one vector, of shape (). Called on all ranks.

    Gradients may be sharded over several meshes; there is one all-reduce for each set of process groups. A
    `norm_type` of infinity gives the largest element.
    """
    alike: defaultdict[Any, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        division = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
        alike[division].append(gradient)
    groups: defaultdict[tuple[ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for divided in alike.values():
        groups[_holders(divided[0])] += [local(gradient) for gradient in divided]
    is_max = norm_type == torch.inf
    parts: list[Tensor] = []
    for holders, tensors in groups.items():
        part = _combined(tensors, norm_type, device)
        for group in holders:
            dist.all_reduce(part, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group)
        parts.append(part)
    if not parts:
        return torch.zeros((), device=device)
    stacked = torch.stack(parts)
    return stacked.max() if is_max else stacked.sum() ** (1 / norm_type)


@torch.no_grad()
def scale_to_norm(gradients: Sequence[Tensor], total: Tensor, norm: float) -> None:
    """Scale gradients so that their norm `total` becomes at most `norm`, as in torch's clipping."""
    factor = (norm / (total + 1e-6)).clamp(max=1.0)
    multiply_by_device([local(gradient) for gradient in gradients], factor)


def _combined(tensors: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the largest element of some tensors, or the sum of their elements' powers, of shape ()."""
    filled = [tensor for tensor in tensors if tensor.numel()]  # an empty shard has no largest element
    dtype = max((t.dtype for t in tensors), key=lambda dtype: dtype.itemsize)
    dtype = torch.float32 if dtype.itemsize < 4 else dtype
    if not filled:
        return torch.zeros((), device=device, dtype=dtype)
    by_device: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for found in norms(filled, norm_type):
        by_device[found.device].append(found.to(dtype))
    # One copy for all that are offloaded: the host waits for each.
    stacked = torch.cat([torch.stack(found).to(device) for found in by_device.values()])
    return stacked.max() if norm_type == torch.inf else (stacked**norm_type).sum()


def _holders(gradient: Tensor) -> tuple[ProcessGroup, ...]:
    """Return the process groups over which a gradient is sharded; none for a full one."""
    if not isinstance(gradient, DTensor):
        return ()
    return tuple(
        gradient.device_mesh.get_group(axis)
        for axis, placement in enumerate(gradient.placements)
        if isinstance(placement, Shard)
    )
