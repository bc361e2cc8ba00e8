"""Walk nested batches: dict, list, tuple, named tuple, Mapping such as `BatchEncoding`, dataclass.

`tensors_in` lists the tensors and `rebuild` replaces them, both in the same order. `None` is allowed anywhere and is
kept. Mappings with string keys are walked in sorted order, so that ranks agree even if they inserted the keys in
different orders.
"""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias, TypeVar, cast

import torch

from drivetrain_state.errors import LeafError

Nested: TypeAlias = Any
Data = TypeVar("Data")


def tensors_in(data: Nested) -> list[torch.Tensor]:
    """Return the tensors of `data`, in walking order; LeafError, with the path, if a leaf is no dense tensor."""
    found: list[torch.Tensor] = []
    if not _collect(data, found):
        path, leaf = next(
            (path, leaf)
            for path, leaf in leaves_with_paths(data)
            if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided
        )
        kind = "a sparse tensor" if isinstance(leaf, torch.Tensor) else f"of type {type(leaf).__name__}"
        raise LeafError(
            f"data{path} is {kind}: dense tensors are allowed, in dicts, lists, tuples and "
            "dataclasses; make it a tensor, or send it with gather_object or broadcast_object"
        )
    return found


def rebuild(data: Data, tensors: Iterator[torch.Tensor]) -> Data:
    """Return the structure of `data` with each tensor replaced by the next one from `tensors`.

    A leaf that is no tensor is kept.
    """
    return cast("Data", _rebuild(data, tensors))


def leaves_with_paths(data: Nested, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the path, such as `['labels'][0]`, and the value of each leaf, tensor or not, in walking order."""
    items = _items(data)
    if items is None:
        if data is not None:
            yield path, data
        return
    for key, child in items:
        step = f"[{key!r}]" if isinstance(data, (Mapping, list, tuple)) else f".{key}"
        yield from leaves_with_paths(child, path + step)


def _items(data: Nested) -> Iterable[tuple[Any, Nested]] | None:
    """Return the key, index or field name of each child and the child, in walking order; None for a leaf."""
    if isinstance(data, (dict, Mapping)):  # dict first, as the check of an abstract class is slow
        return [(key, data[key]) for key in _keys(cast("Mapping[Any, Any]", data))]
    if isinstance(data, (list, tuple)):
        return enumerate(cast("list[Any]", data))
    if is_dataclass(data) and not isinstance(data, type):
        return [(f.name, getattr(data, f.name)) for f in fields(data)]
    return None


def _keys(data: Mapping[Any, Any]) -> list[Any]:
    try:
        return sorted(data)
    except TypeError:  # keys of mixed types cannot be sorted
        return list(data)


def _collect(data: Nested, found: list[torch.Tensor]) -> bool:
    """Append the tensors of `data` to `found`; stop and return False at the first leaf that is no dense tensor."""
    if isinstance(data, torch.Tensor):
        found.append(data)
        return data.layout is torch.strided
    items = _items(data)
    if items is None:
        return data is None
    for _, child in items:  # noqa: SIM110 all() of a generator would cost as much as the walk itself
        if not _collect(child, found):
            return False
    return True


def _rebuild(data: Nested, tensors: Iterator[torch.Tensor]) -> Nested:
    if isinstance(data, torch.Tensor):
        return next(tensors)
    if isinstance(data, (dict, Mapping)):
        mapping = cast("Mapping[Any, Any]", data)
        values = {key: _rebuild(mapping[key], tensors) for key in _keys(mapping)}
        if type(mapping) is dict or not isinstance(mapping, MutableMapping):
            in_order = {key: values[key] for key in mapping}
            return in_order if type(mapping) is dict else cast("Any", type(mapping))(in_order)
        filled = copy(mapping)  # keeps attributes that are not items
        for key, value in values.items():  # the outputs of transformers' models refuse `update`
            filled[key] = value
        return filled
    if isinstance(data, (list, tuple)):
        children = [_rebuild(child, tensors) for child in cast("list[Any]", data)]
        kind = cast("Any", type(data))
        return kind._make(children) if hasattr(kind, "_make") else kind(children)
    if not is_dataclass(data) or isinstance(data, type):
        return data
    filled = copy(data)
    for f in fields(data):
        # Frozen dataclasses refuse setattr.
        object.__setattr__(filled, f.name, _rebuild(getattr(data, f.name), tensors))
    return filled
