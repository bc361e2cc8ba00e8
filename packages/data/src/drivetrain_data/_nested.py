"""Walk nested batches: dict, list, tuple, named tuple, Mapping such as `BatchEncoding`, dataclass."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor


def map_tensors(function: Callable[[Tensor], Any], data: Any) -> Any:
    """The same structure with `function` applied to every tensor; anything else stays as it is."""
    if isinstance(data, Tensor):
        return function(data)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_tensors(function, item) for item in data))
    if isinstance(data, (list, tuple)):
        return type(data)(map_tensors(function, item) for item in data)
    if isinstance(data, dict):
        return _like(data, {key: map_tensors(function, item) for key, item in data.items()})
    if isinstance(data, Mapping):
        return type(data)({key: map_tensors(function, item) for key, item in data.items()})  # pyright: ignore
    if is_dataclass(data) and not isinstance(data, type):
        changed = {f.name: map_tensors(function, getattr(data, f.name)) for f in fields(data) if f.init}
        return replace(data, **changed)
    return data


def _like(original: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    if type(original) is dict:
        return items
    copied = original.copy()  # a subclass keeps what it holds beside its items
    copied.update(items)
    return copied
