"""Change the tensors of nested arguments and outputs: dict, list, tuple, named tuple, dataclass."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, cast

import torch
from torch import Tensor


def cast_floating(value: Any, dtype: torch.dtype, *, only: Collection[torch.dtype] | None = None) -> Any:
    """Return the same structure with real floating-point tensors in `dtype`; `only` limits the dtypes to cast."""

    def change(tensor: Tensor) -> Tensor:
        is_cast = tensor.is_floating_point() if only is None else tensor.dtype in only
        return tensor.to(dtype) if is_cast else tensor

    return map_tensors(change, value)


def without_graphs(value: Any) -> Any:
    """Return the same structure whose tensors are leaves: the values, without the graphs that made them."""
    return map_tensors(lambda t: t if t.is_leaf else t.detach().requires_grad_(t.requires_grad), value)


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return the same structure with changed tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        mapping = cast("Mapping[Any, Any]", value)
        values = {key: map_tensors(change, child) for key, child in mapping.items()}
        if type(mapping) is dict:
            return values
        if not isinstance(mapping, MutableMapping):
            return cast("Any", type(mapping))(values)
        filled = copy(mapping)  # keeps the attributes that the type holds besides its items
        for key, child in values.items():  # the `update` of a ModelOutput raises
            filled[key] = child
        return filled
    if isinstance(value, (list, tuple)):
        children = [map_tensors(change, child) for child in cast("Sequence[Any]", value)]
        kind = cast("Any", type(value))
        return kind._make(children) if hasattr(kind, "_make") else kind(children)
    if is_dataclass(value) and not isinstance(value, type):
        filled = copy(value)
        for each in fields(value):
            object.__setattr__(filled, each.name, map_tensors(change, getattr(value, each.name)))
        return filled
    return value


def floating_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors in nested arguments, in their order."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
        return
    children: Iterable[Any] = ()
    if isinstance(value, Mapping):
        children = cast("Mapping[Any, Any]", value).values()
    elif isinstance(value, (list, tuple)):
        children = cast("Sequence[Any]", value)
    elif is_dataclass(value) and not isinstance(value, type):
        children = [getattr(value, each.name, None) for each in fields(value)]
    for child in children:
        yield from floating_tensors(child)
