"""Cast the floating-point tensors of nested arguments and outputs: dict, list, tuple, named tuple, dataclass."""

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, cast

import torch
from torch import Tensor


def cast_floating(value: Any, dtype: torch.dtype, *, only: Collection[torch.dtype] | None = None) -> Any:
    """Return the same structure with its real floating-point tensors in `dtype`; of the dtypes `only`, if given."""
    if isinstance(value, Tensor):
        is_cast = value.is_floating_point() if only is None else value.dtype in only
        return value.to(dtype) if is_cast else value
    if isinstance(value, Mapping):
        return _cast_mapping(cast("Mapping[Any, Any]", value), dtype, only)
    if isinstance(value, (list, tuple)):
        children = [cast_floating(child, dtype, only=only) for child in cast("Sequence[Any]", value)]
        kind = cast("Any", type(value))
        return kind._make(children) if hasattr(kind, "_make") else kind(children)
    if is_dataclass(value) and not isinstance(value, type):
        filled = copy(value)
        for each in fields(value):
            changed = cast_floating(getattr(value, each.name), dtype, only=only)
            object.__setattr__(filled, each.name, changed)
        return filled
    return value


def floating_dtypes(value: Any) -> Iterator[torch.dtype]:
    """Yield the dtypes of the floating-point tensors in nested arguments, in their order."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value.dtype
    elif isinstance(value, Mapping):
        for child in cast("Mapping[Any, Any]", value).values():
            yield from floating_dtypes(child)
    elif isinstance(value, (list, tuple)):
        for child in cast("Sequence[Any]", value):
            yield from floating_dtypes(child)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from floating_dtypes(getattr(value, each.name))


def _cast_mapping(
    value: Mapping[Any, Any], dtype: torch.dtype, only: Collection[torch.dtype] | None
) -> Mapping[Any, Any]:
    values = {key: cast_floating(child, dtype, only=only) for key, child in value.items()}
    if type(value) is dict:
        return values
    if isinstance(value, MutableMapping):
        filled = copy(value)  # keeps the attributes that the type holds besides its items
        for key, child in values.items():
            filled[key] = child
        return filled
    return cast("Any", type(value))(values)
