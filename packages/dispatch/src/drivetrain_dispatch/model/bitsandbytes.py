"""Handle quantised weights of bitsandbytes, whose scales are attributes and whose layers keep state about them.

Weights are recognised by the name of their class's module, so that bitsandbytes is never imported without need.
"""

import copy
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import ref

from torch import Tensor, nn

from drivetrain_dispatch.compat import PARAMETERS


def is_of_bitsandbytes(tensor: Tensor) -> bool:
    """Return whether a weight is quantised by bitsandbytes."""
    return any(kind.__module__.startswith("bitsandbytes.") for kind in type(tensor).__mro__)


def parts_beside(tensor: Tensor) -> Iterable[Tensor]:
    """Return the tensors of a weight other than its data: scales, and the scales and tables of those."""
    return _tensors_in(_attributes(tensor))


def made_anew(tensor: Tensor, parts: Iterator[Tensor]) -> Tensor:
    """Return a copy of a weight made of other tensors: the data, then those of `parts_beside` in their order."""
    kind: Any = type(tensor)
    data = next(parts)
    attributes = _with_tensors(_attributes(tensor), parts)
    if "CB" in vars(tensor):  # an 8-bit weight's alias of its data
        attributes["CB"] = data
    return kind(data, requires_grad=False, **attributes)


def has_no_values(weight: Tensor, layer: nn.Module) -> bool:
    """Return whether a layer's weight is not packed yet; bitsandbytes packs it when it is moved to a device."""
    is_packed = all(vars(weight).get(name, weight) is not None for name in ("quant_state", "SCB"))
    return not is_packed and _state_with_scales(layer) is None


def restore_scales(model: nn.Module) -> None:
    """Move the scales of 8-bit weights, which a forward took into their layers' state, back into the weights."""
    for layer in model.modules():
        if (state := _state_with_scales(layer)) is not None:
            weight = layer.__dict__[PARAMETERS]["weight"]
            vars(weight).update(CB=weight.data, SCB=state.SCB)
            state.CB = state.SCB = None


def _state_with_scales(layer: nn.Module) -> Any:
    """Return the state of an 8-bit layer if a forward took the scales into it, else None."""
    state, weight = layer.__dict__.get("state"), layer.__dict__[PARAMETERS].get("weight")
    took = state is not None and isinstance(weight, Tensor) and "CB" in vars(weight) and state.CB is not None
    return state if took else None


def follow(weight: Tensor) -> None:
    """Update the reference to the scales that the layer of a 4-bit weight keeps."""
    layer = vars(weight).get("module")
    if isinstance(layer, nn.Module):
        layer.quant_state = vars(weight)["quant_state"]


def lend_state(attributes: dict[str, Any], weight: Any) -> None:
    """Set up an 8-bit layer, given by its attributes, to compute with a temporarily fetched weight.

    A forward would move the scales from the weight, which may be used again, into the layer's state, where the
    backward reads them too. Instead, the layer gets a copy of its state for this use, with the scales filled in.
    """
    state: Any = attributes.get("state")
    if hasattr(state, "CB"):
        lent = attributes["state"] = copy.copy(state)
        lent.lent_by = state
        lent.CB, lent.SCB, weight.CB = weight.data, weight.SCB, None


def return_state(attributes: dict[str, Any]) -> None:
    """Restore a layer's own state, which refers to no weight."""
    state: Any = attributes.get("state")
    if hasattr(state, "lent_by"):
        attributes["state"] = state.lent_by


class KeptLayout:
    """A handle that stops a 4-bit layer on the host from changing its weight's layout, until it is removed.

    On processors with AVX-512 bf16 the layer's forward converts the weight to a layout of its own. That would copy
    weights that are pages of a file into memory, and change a fetched weight while other threads use it.

    Args:
        layer: The layer to protect.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = ref(layer)
        self._converts = layer.__dict__.get("support_avx512bf16_for_cpu")
        if self._converts:
            layer.__dict__["support_avx512bf16_for_cpu"] = False

    def remove(self) -> None:
        """Restore the layer's behaviour."""
        if self._converts and (layer := self._layer()) is not None:
            layer.__dict__["support_avx512bf16_for_cpu"] = True


def _attributes(tensor: Tensor) -> dict[str, Any]:
    return {name: value for name, value in vars(tensor).items() if name != "CB"}


def _tensors_in(attributes: dict[str, Any]) -> Iterable[Tensor]:
    """Yield the tensors among attributes, including those of the scales, which may have scales of their own."""
    for value in attributes.values():
        if isinstance(value, Tensor):
            yield value
        elif _is_state(value):
            yield from _tensors_in(vars(value))


def _with_tensors(attributes: dict[str, Any], parts: Iterator[Tensor]) -> dict[str, Any]:
    """Return the same attributes with other tensors, taken in the same order."""
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
