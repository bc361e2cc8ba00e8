"""Take apart and rebuild quantized weights, which are made of several tensors: torchao's wrappers and bitsandbytes'.

Code that moves, writes or maps weights takes plain tensors from a weight here, and rebuilds the weight from others.
The scales of bitsandbytes are attributes, and its layers keep state about them. Its weights are recognised by the
name of their class's module, so that bitsandbytes is never imported without need.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn

from drivetrain_dispatch.compat import PARAMETERS
from drivetrain_dispatch.errors import DeviceMapError
from drivetrain_weights.tensor_box import is_dtensor


def is_quantized(tensor: Tensor) -> bool:
    """Return whether a tensor is made of several plain tensors."""
    if type(tensor) in (nn.Parameter, Tensor):
        return False
    wraps = hasattr(tensor, "__tensor_flatten__") and hasattr(type(tensor), "__tensor_unflatten__")
    return (wraps and not is_dtensor(tensor)) or _is_of_bitsandbytes(tensor)


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that a tensor is made of, in a fixed order; a plain tensor is its only part."""
    if not is_quantized(tensor):
        return [tensor]
    if _is_of_bitsandbytes(tensor):
        found: list[Tensor] = [tensor.data]
        _attributes(vars(tensor), lambda part: found.append(part) or part)
        return found
    wrapper: Any = tensor
    names, _ = wrapper.__tensor_flatten__()
    return [part for name in names for part in parts_of(getattr(tensor, name))]


def parts_in_file(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return the parts of a tensor by their names in a file; a plain tensor keeps its own name."""
    parts = parts_of(tensor)
    if parts[0] is tensor:
        return {name: tensor}
    return {f"{name}/{index}": part for index, part in enumerate(parts)}


def made_of(tensor: Tensor, parts: Iterable[Tensor]) -> Tensor:
    """Rebuild a weight from other parts, in the order of `parts_of`. The parts may be on another device."""
    remaining = iter(parts)  # a nested weight takes its parts from the same iterator
    if not is_quantized(tensor):
        return next(remaining)
    if _is_of_bitsandbytes(tensor):
        data, kind = next(remaining), cast("Any", type(tensor))
        attributes = _attributes(vars(tensor), lambda _: next(remaining))
        if "CB" in vars(tensor):
            attributes["CB"] = data
        return kind(data, requires_grad=False, **attributes)
    wrapper: Any = tensor
    names, context = wrapper.__tensor_flatten__()
    inner = {name: made_of(getattr(tensor, name), remaining) for name in names}
    return type(wrapper).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())


def put_parts(tensor: Tensor, parts: Sequence[Tensor]) -> None:
    """Replace the parts of a tensor in place, so that all references see the new parts. An error changes nothing."""
    new = made_of(tensor, parts)
    if not is_quantized(tensor) and takes(tensor, new):
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
    layer = vars(tensor).get("module")  # of a 4-bit weight, which refers to the scales too
    if isinstance(layer, nn.Module):
        layer.quant_state = vars(tensor)["quant_state"]


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
    """Return why a layer's packed weight cannot be offloaded, as a sentence's predicate; None if offloading works."""
    if weight.requires_grad:
        return "learns"
    # bitsandbytes quantizes a weight when it is moved to a device; a forward takes the scales into the layer's state.
    has_scales = all(vars(weight).get(name, weight) is not None for name in ("quant_state", "SCB"))
    return None if has_scales or _state_with_scales(layer) is not None else "has no quantised values yet"


def _is_of_bitsandbytes(tensor: Tensor) -> bool:
    return any(kind.__module__.startswith("bitsandbytes.") for kind in type(tensor).__mro__)


def restore_scales(model: nn.Module) -> None:
    """Move the scales of 8-bit weights back into the weights; a forward moves them into the layers' states."""
    for layer in model.modules():
        if (state := _state_with_scales(layer)) is not None:
            weight = layer.__dict__[PARAMETERS]["weight"]
            vars(weight).update(CB=weight.data, SCB=state.SCB)
            state.CB = state.SCB = None


def _state_with_scales(layer: nn.Module) -> Any:
    """Return the state of an 8-bit layer if a forward moved the scales there, else None."""
    state, weight = layer.__dict__.get("state"), layer.__dict__[PARAMETERS].get("weight")
    took = state is not None and isinstance(weight, Tensor) and "CB" in vars(weight) and state.CB is not None
    return state if took else None


def lend_state(attributes: dict[str, Any], weight: Any) -> None:
    """Set up an 8-bit layer, given by its attributes, to compute with a temporarily fetched weight."""
    # A forward would move the scales from the weight, which may be used again, into the layer's state, where the
    # backward reads them too. Instead, the layer gets a copy of its state for this use.
    state: Any = attributes.get("state")
    if hasattr(state, "CB"):
        lent = attributes["state"] = copy.copy(state)
        lent.lent_by = state
        lent.CB, lent.SCB, weight.CB = weight.data, weight.SCB, None


def return_state(attributes: dict[str, Any]) -> None:
    """Restore the layer's original state, without a reference to the fetched weight."""
    state: Any = attributes.get("state")
    if hasattr(state, "lent_by"):
        attributes["state"] = state.lent_by


class KeptLayout:
    """A handle that stops a 4-bit layer on the host from changing its weight's layout, until it is removed."""

    # On processors with AVX-512 bf16 the layer's forward converts the weight. That would copy weights that are pages
    # of a file into memory, and change a fetched weight while other threads use it.

    def __init__(self, layer: nn.Module) -> None:
        self._layer = ref(layer)
        self._converts = layer.__dict__.get("support_avx512bf16_for_cpu")
        if self._converts:
            layer.__dict__["support_avx512bf16_for_cpu"] = False

    def remove(self) -> None:
        """Restore the layer's behaviour."""
        if self._converts and (layer := self._layer()) is not None:
            layer.__dict__["support_avx512bf16_for_cpu"] = True


def _attributes(given: Mapping[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return attributes with their tensors changed in order, including the tensors of nested scales."""
    changed: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, Tensor) and name != "CB":  # an 8-bit weight's alias of its data
            changed[name] = change(value)
        elif type(value).__name__ == "QuantState":
            changed[name] = copy.copy(value)
            vars(changed[name]).update(_attributes(vars(value), change))
        elif name != "CB":
            changed[name] = value
    return changed
