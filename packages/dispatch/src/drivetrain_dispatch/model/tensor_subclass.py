"""Take apart and rebuild packed weights, which are made of several tensors: torchao's wrappers and bitsandbytes'.

Code that moves, writes or maps weights gets a weight's plain tensors here, and rebuilds the weight from other ones.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain_dispatch.errors import DeviceMapError
from drivetrain_dispatch.model.bitsandbytes import (
    follow,
    has_no_values,
    is_of_bitsandbytes,
    made_anew,
    parts_beside,
)
from drivetrain_weights.tensor_box import is_dtensor


def is_packed(tensor: Tensor) -> bool:
    """Return whether a tensor is made of several plain tensors."""
    if type(tensor) in (nn.Parameter, Tensor):
        return False
    wraps = hasattr(tensor, "__tensor_flatten__") and hasattr(type(tensor), "__tensor_unflatten__")
    return (wraps and not is_dtensor(tensor)) or is_of_bitsandbytes(tensor)


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that a tensor is made of, in a fixed order; a plain tensor is its only part."""
    if not is_packed(tensor):
        return [tensor]
    if is_of_bitsandbytes(tensor):
        return [tensor.data, *parts_beside(tensor)]
    wrapper: Any = tensor
    names, _ = wrapper.__tensor_flatten__()
    return [part for name in names for part in parts_of(getattr(tensor, name))]


def made_of(tensor: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Return the same weight made of other parts in the order of `parts_of`; they may be on another device."""
    remaining = iter(parts)
    made = _made(tensor, remaining)
    assert next(remaining, None) is None
    return made


def _made(tensor: Tensor, parts: Iterator[Tensor]) -> Tensor:
    if not is_packed(tensor):
        return next(parts)
    if is_of_bitsandbytes(tensor):
        return made_anew(tensor, parts)
    wrapper: Any = tensor
    names, context = wrapper.__tensor_flatten__()
    inner = {name: _made(getattr(tensor, name), parts) for name in names}
    return type(wrapper).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())


def put_parts(tensor: Tensor, parts: Sequence[Tensor]) -> None:
    """Replace the parts of a tensor in place, so that every reference to it sees the new ones.

    Raises:
        DeviceMapError: The tensor cannot be changed in place, and is unchanged.
    """
    new = made_of(tensor, parts)
    if not is_packed(tensor) and takes(tensor, new):
        tensor.data = new
        return
    if not isinstance(new, nn.Parameter) and isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
    # swap_tensors refuses a tensor with weak references, such as nn.LSTM's, and a leaf of a live autograd graph.
    try:
        torch.utils.swap_tensors(tensor, new)
    except RuntimeError as error:
        raise DeviceMapError(
            f"a weight of shape {list(tensor.shape)} cannot be moved from {tensor.device} to {new.device} while "
            f"others refer to it ({error}): let go of losses and outputs that were computed with it, or move its "
            "module before the model is dispatched, module.to(...)"
        ) from error
    follow(tensor)


def takes(tensor: Tensor, value: Tensor) -> bool:
    """Return whether torch lets `tensor.data` be set to a value of another device and dtype."""
    if tensor.is_meta or value.is_meta:
        return tensor.is_meta and value.is_meta
    probe = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    try:
        probe.data = torch.empty(0, dtype=value.dtype, device=value.device)
    except RuntimeError:
        return False
    return True


def size_in_bytes(tensor: Tensor) -> int:
    """Return the bytes of all parts of a tensor."""
    return sum(part.nbytes for part in parts_of(tensor))


def why_unready(weight: Tensor, layer: nn.Module) -> str | None:
    """Return why the packed weight of a layer cannot be offloaded, as the predicate of a sentence; None if it can."""
    if weight.requires_grad:
        return "learns"
    return "has no quantised values yet" if has_no_values(weight, layer) else None
