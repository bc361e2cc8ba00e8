"""Quantised weights of bitsandbytes: scales are attributes beside the data, and layers keep state of them.

Known by the library's module, so that nothing is imported where nobody uses it.
"""

import copy
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import ref

from torch import Tensor, nn


def is_of_bitsandbytes(tensor: Tensor) -> bool:
    """Whether a weight is one of theirs."""
    return any(kind.__module__.startswith("bitsandbytes.") for kind in type(tensor).__mro__)


def parts_beside(tensor: Tensor) -> Iterable[Tensor]:
    """The tensors of a weight beside its data: scales, and scales and tables of those."""
    return _tensors_in(_attributes(tensor))


def made_anew(tensor: Tensor, parts: Iterator[Tensor]) -> Tensor:
    """The same weight of other tensors: its data, and those beside it in their order."""
    kind: Any = type(tensor)
    data = next(parts)
    attributes = _with_tensors(_attributes(tensor), parts)
    if "CB" in vars(tensor):  # 8 bits: another name of the data
        attributes["CB"] = data
    return kind(data, requires_grad=False, **attributes)


def has_no_values(tensor: Tensor) -> bool:
    """Whether a weight is to be packed yet, when it is moved to a device."""
    return any(vars(tensor).get(name, tensor) is None for name in ("quant_state", "SCB"))


def take_back(model: nn.Module) -> None:
    """Have 8-bit layers give their weights back what a forward took from them."""
    for module in model.modules():
        state, weight = module.__dict__.get("state"), module.__dict__["_parameters"].get("weight")
        if state is not None and isinstance(weight, Tensor) and "CB" in vars(weight) and state.CB is not None:
            vars(weight).update(CB=weight.data, SCB=state.SCB)
            state.CB = state.SCB = None


def follow(weight: Tensor) -> None:
    """Have the layer of a 4-bit weight know its scales, which it keeps too."""
    layer = vars(weight).get("module")
    if isinstance(layer, nn.Module):
        layer.quant_state = vars(weight)["quant_state"]


def lend_state(attributes: dict[str, Any], weight: Any) -> None:
    """Have an 8-bit layer, given by its attributes, compute with a weight that is there for a while.

    A forward would put the weight's scales into the layer's state, where its backward looks for them too, and take
    them from the weight, which may be used again. The state is filled here, and is a copy for this use.
    """
    state: Any = attributes.get("state")
    if hasattr(state, "CB"):
        lent = attributes["state"] = copy.copy(state)
        lent.lent_by = state
        lent.CB, lent.SCB, weight.CB = weight.data, weight.SCB, None


def return_state(attributes: dict[str, Any]) -> None:
    """Give a layer its own state back, which knows of no weight."""
    state: Any = attributes.get("state")
    if hasattr(state, "lent_by"):
        attributes["state"] = state.lent_by


class KeptLayout:
    """Has a 4-bit layer that the host computes leave its weight as it is, until it is removed.

    On processors with AVX-512 bf16 its forward puts the weight into a layout of its own: into memory, where it is
    the pages of a file, and under the hands of other threads, where it comes for all of them.

    Args:
        layer: The layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = ref(layer)
        self._converts = layer.__dict__.get("support_avx512bf16_for_cpu")
        if self._converts:
            layer.__dict__["support_avx512bf16_for_cpu"] = False

    def remove(self) -> None:
        """Have it do as before."""
        if self._converts and (layer := self._layer()) is not None:
            layer.__dict__["support_avx512bf16_for_cpu"] = True


def _attributes(tensor: Tensor) -> dict[str, Any]:
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
