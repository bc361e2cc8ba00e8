"""Multiply, measure and unscale many gradients at once, with the kernels of torch's own optimizers and clipping."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from drivetrain_backends.compat import foreach_multiply, foreach_norm, foreach_unscale, values_of_sparse


def multiply_by_device(tensors: Sequence[Tensor], factor: Tensor | float) -> None:
    """Multiply tensors on any devices in place by one factor of shape (), with one kernel per device and dtype."""
    by_kind: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_kind[tensor.device, tensor.dtype].append(tensor)
    for (device, _), together in by_kind.items():
        there = factor.to(device) if isinstance(factor, Tensor) else factor
        foreach_multiply(together, there)


def scale_to_norm(gradients: Sequence[Tensor], total: Tensor, norm: float) -> None:
    """Scale gradients in place so that their norm `total`, of shape (), becomes at most `norm`, as torch clips."""
    multiply_by_device(gradients, (norm / (total + 1e-6)).clamp(max=1.0))


def norms(tensors: Sequence[Tensor], norm_type: float) -> tuple[Tensor, ...]:
    """Return the norm of each of some tensors on one device, of shape ()."""
    return tuple(foreach_norm(list(tensors), norm_type))


def unscale_on_host(gradients: Sequence[Tensor], inverse: Tensor) -> Tensor:
    """Multiply gradients on the host in place; return, of shape (), 1.0 if a gradient is not finite, else 0.0."""
    found = torch.zeros(())
    foreach_unscale(list(gradients), found, inverse)
    return found


def stored_values(gradient: Tensor) -> Tensor:
    """Return the stored values of a gradient without a copy: the nonzero rows if it is sparse, otherwise itself."""
    return values_of_sparse(gradient) if gradient.is_sparse else gradient
