"""Weights that are several tensors: quantised ones, of torch's wrapper classes (torchao's) and of bitsandbytes.

Whoever moves, writes or maps weights asks here which tensors one is made of, and has it made anew of others.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain_dispatch.errors import DeviceMapError
from drivetrain_dispatch.parts import is_divided


def is_packed(tensor: Tensor) -> bool:
    """Whether a tensor is made of several."""
    if type(tensor) in (nn.Parameter, Tensor):
        return False
    wraps = hasattr(tensor, "__tensor_flatten__") and hasattr(type(tensor), "__tensor_unflatten__")
    return (wraps and not is_divided(tensor)) or _of_bitsandbytes(tensor)


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a tensor is made of, always in the same order; it alone if it is one itself."""
    if _of_bitsandbytes(tensor):
        return [tensor.data, *_tensors_in(_attributes(tensor))]
    if is_packed(tensor):
        return [part for inner in _inner(tensor) for part in parts_of(inner)]
    return [tensor]


def made_of(tensor: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """The same weight, made of other parts, which may be on another device; `parts_of` gives their order."""
    remaining = iter(parts)
    made = _made(tensor, remaining)
    assert next(remaining, None) is None
    return made


def put_parts(tensor: Tensor, parts: Sequence[Tensor]) -> None:
    """Have a tensor be made of other parts, wherever it is known.

    Raises:
        DeviceMapError: It cannot be moved to that kind of device as the object that it is.
    """
    new = made_of(tensor, parts)
    if not is_packed(tensor) and takes(tensor, new):
        tensor.data = new
        return
    if not isinstance(new, nn.Parameter) and isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
    try:
        torch.utils.swap_tensors(tensor, new)
    except RuntimeError as error:  # nn.LSTM and its like hold weak references
        raise DeviceMapError(
            f"a weight of shape {list(tensor.shape)} cannot be moved from {tensor.device} to {new.device} while "
            f"others refer to it ({error}): move its module there first, with module.to({str(new.device)!r})"
        ) from error
    layer = vars(tensor).get("module")
    if isinstance(layer, nn.Module):  # of bitsandbytes' 4 bits, which keeps the scales too
        layer.quant_state = vars(tensor)["quant_state"]


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
    missing = next((name for name in ("quant_state", "SCB") if vars(tensor).get(name, tensor) is None), None)
    return "has no quantised values yet" if missing else None


def take_back(model: nn.Module) -> None:
    """Have the 8-bit layers of bitsandbytes give their weights back what a forward took from them."""
    for module in model.modules():
        state, weight = module.__dict__.get("state"), module.__dict__["_parameters"].get("weight")
        if state is not None and isinstance(weight, Tensor) and "CB" in vars(weight) and state.CB is not None:
            vars(weight).update(CB=weight.data, SCB=state.SCB)
            state.CB = state.SCB = None


def lend_state(attributes: dict[str, Any]) -> None:
    """Have an 8-bit layer of bitsandbytes, given by its attributes, work with a copy of its state.

    A forward puts the weight into the state, and its backward finds it there.
    """
    state: Any = attributes.get("state")
    if hasattr(state, "CB"):
        lent = attributes["state"] = copy.copy(state)
        lent.lent_by = state


def return_state(attributes: dict[str, Any]) -> None:
    """Give a layer its own state back, which knows of no weight."""
    state: Any = attributes.get("state")
    if hasattr(state, "lent_by"):
        attributes["state"] = state.lent_by


def _of_bitsandbytes(tensor: Tensor) -> bool:
    return any(kind.__module__.startswith("bitsandbytes.") for kind in type(tensor).__mro__)


def _inner(tensor: Any) -> list[Tensor]:
    names, _ = tensor.__tensor_flatten__()
    return [getattr(tensor, name) for name in names]


def _made(tensor: Tensor, parts: Iterator[Tensor]) -> Tensor:
    if _of_bitsandbytes(tensor):
        kind: Any = type(tensor)
        data = next(parts)
        attributes = _with_tensors(_attributes(tensor), parts)
        if "CB" in vars(tensor):  # 8 bits: another name of the data
            attributes["CB"] = data
        return kind(data, requires_grad=False, **attributes)
    if is_packed(tensor):
        wrapper: Any = tensor
        names, context = wrapper.__tensor_flatten__()
        inner = {name: _made(getattr(tensor, name), parts) for name in names}
        return type(wrapper).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    return next(parts)


def _attributes(tensor: Tensor) -> dict[str, Any]:
    """What a weight of bitsandbytes has beside its data."""
    return {name: value for name, value in vars(tensor).items() if name != "CB"}


def _tensors_in(attributes: dict[str, Any]) -> Iterable[Tensor]:
    """The tensors among attributes, and those of the scales, which may have scales of their own."""
    for value in attributes.values():
        if isinstance(value, Tensor):
            yield value
        elif _is_state(value):
            yield from _tensors_in(vars(value))


def _with_tensors(attributes: dict[str, Any], parts: Iterator[Tensor]) -> dict[str, Any]:
    """The same attributes with other tensors, taken in the same order."""
    new = dict(attributes)
    for name, value in attributes.items():
        if isinstance(value, Tensor):
            new[name] = next(parts)
        elif _is_state(value):
            state = new[name] = copy.copy(value)
            vars(state).update(_with_tensors(vars(value), parts))
    return new


def _is_state(value: object) -> bool:
    return type(value).__name__ == "QuantState"
