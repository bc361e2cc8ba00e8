"""torch's private kernels over many tensors at once, which its own optimizers and gradient clipping use.

They are the same in torch 2.9 to 2.15; tests/backends/gradients/test_multi_tensor.py holds each to what is relied
on, and docs/platforms.md lists them.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor


def multiply(tensors: Sequence[Tensor], factor: Tensor | float) -> None:
    """Multiply tensors in place by one factor, of shape () on their device."""
    if tensors:
        torch._foreach_mul_(list(tensors), factor)  # pyright: ignore[reportPrivateUsage]


def multiply_by_device(tensors: Sequence[Tensor], factor: Tensor | float) -> None:
    """Multiply tensors of any devices in place by one factor, of shape (), in one kernel a device and dtype."""
    by_kind: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_kind[tensor.device, tensor.dtype].append(tensor)
    for (device, _), together in by_kind.items():
        there = factor.to(device) if isinstance(factor, Tensor) else factor
        torch._foreach_mul_(together, there)  # pyright: ignore[reportPrivateUsage]


def norms(tensors: Sequence[Tensor], norm_type: float) -> tuple[Tensor, ...]:
    """Return the norm of each of some tensors on one device, of shape ()."""
    return tuple(torch._foreach_norm(list(tensors), norm_type))  # pyright: ignore[reportPrivateUsage]


def unscale_on_host(gradients: Sequence[Tensor], inverse: Tensor) -> Tensor:
    """Multiply gradients on the host in place, and return 1.0 if one is not finite, else 0.0; of shape ().

    Args:
        gradients: The gradients, in the host's memory.
        inverse: The factor, a tensor of shape () in fp32.
    """
    found = torch.zeros(())
    torch.ops.aten._amp_foreach_non_finite_check_and_unscale_(list(gradients), found, inverse)
    return found


def stored_values(gradient: Tensor) -> Tensor:
    """Return the values that a gradient stores: itself, or the nonzero rows of a sparse one, without a copy."""
    return gradient._values() if gradient.is_sparse else gradient
