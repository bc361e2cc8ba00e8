"""Weights that are several tensors: quantised ones, of torch's wrapper classes (torchao's) and of bitsandbytes.

Whoever moves, writes or maps weights asks here which tensors one is made of, and has it made anew of others.
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
from drivetrain_dispatch.model.dtensor import is_divided


def is_packed(tensor: Tensor) -> bool:
    """Whether a tensor is made of several."""
    if type(tensor) in (nn.Parameter, Tensor):
        return False
    wraps = hasattr(tensor, "__tensor_flatten__") and hasattr(type(tensor), "__tensor_unflatten__")
    return (wraps and not is_divided(tensor)) or is_of_bitsandbytes(tensor)


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a tensor is made of, always in the same order; it alone if it is one itself."""
    if not is_packed(tensor):
        return [tensor]
    if is_of_bitsandbytes(tensor):
        return [tensor.data, *parts_beside(tensor)]
    wrapper: Any = tensor
    names, _ = wrapper.__tensor_flatten__()
    return [part for name in names for part in parts_of(getattr(tensor, name))]


def made_of(tensor: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """The same weight, made of other parts, which may be on another device; `parts_of` gives their order."""
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
    """Have a tensor be made of other parts, wherever it is known.

    Raises:
        DeviceMapError: It cannot be changed as the object that it is. It is as it was.
    """
    new = made_of(tensor, parts)
    if not is_packed(tensor) and takes(tensor, new):
        tensor.data = new
        return
    if not isinstance(new, nn.Parameter) and isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
    try:
        torch.utils.swap_tensors(tensor, new)
    except (
        RuntimeError
    ) as error:  # nn.LSTM for example holds weak references, a graph that is alive its leaves
        raise DeviceMapError(
            f"a weight of shape {list(tensor.shape)} cannot be moved from {tensor.device} to {new.device} while "
            f"others refer to it ({error}): let go of losses and outputs that were computed with it, or move its "
            "module before the model is dispatched, module.to(...)"
        ) from error
    follow(tensor)


def takes(tensor: Tensor, value: Tensor) -> bool:
    """Whether a tensor can be given a value of another device and dtype: not where torch has it in another way."""
    if tensor.is_meta or value.is_meta:
        return tensor.is_meta and value.is_meta
    probe = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    try:
        probe.data = torch.empty(0, dtype=value.dtype, device=value.device)
    except RuntimeError:
        return False
    return True


def size_in_bytes(tensor: Tensor) -> int:
    """The bytes of all parts."""
    return sum(part.nbytes for part in parts_of(tensor))


def why_unready(tensor: Tensor) -> str | None:
    """Why a packed weight cannot come and go; None where it can."""
    if tensor.requires_grad:
        return "learns"
    return "has no quantised values yet" if has_no_values(tensor) else None
