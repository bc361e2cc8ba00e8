"""Walk nested batches: dict, list, tuple, named tuple, Mapping such as `BatchEncoding`, dataclass."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

Nested: TypeAlias = Any


def map_leaves(data: Nested, change: Callable[[Any], Any]) -> Nested:
    """Return the same structure with every leaf, tensor or not, replaced by `change(leaf)`."""
    if isinstance(data, torch.Tensor):
        return change(data)
    if isinstance(data, Mapping):
        mapping = cast("Mapping[Any, Any]", data)
        values = {key: map_leaves(value, change) for key, value in mapping.items()}
        if type(mapping) is dict:
            return values
        if not isinstance(mapping, MutableMapping):
            return cast("Any", type(mapping))(values)
        filled = copy(mapping)  # keeps the attributes that the type holds besides its items
        for key, value in values.items():  # the `update` of a ModelOutput raises
            filled[key] = value
        return filled
    if isinstance(data, PackedSequence):
        return change(data)
    if isinstance(data, (list, tuple)):
        children = [map_leaves(child, change) for child in cast("Sequence[Any]", data)]
        kind = cast("Any", type(data))
        return kind._make(children) if hasattr(kind, "_make") else kind(children)
    if is_dataclass(data) and not isinstance(data, type):
        filled = copy(data)
        for f in fields(data):
            object.__setattr__(filled, f.name, map_leaves(getattr(data, f.name), change))
        return filled
    return change(data)


def leaves_of(data: Nested) -> list[Any]:
    """Return every leaf, tensor or not, in the order of `map_leaves`."""
    found: list[Any] = []
    map_leaves(data, found.append)
    return found


def to_device(batch: Nested, device: torch.device, *, non_blocking: bool) -> Nested:
    """Copy tensors and objects with a `to(device)` method to a device; return other leaves unchanged."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        return leaf.to(device) if hasattr(leaf, "to") else leaf

    return map_leaves(batch, move)


def leading_size(batch: Nested) -> int | None:
    """Guess the number of samples in a batch from the sizes of its parts; None if no part has a size or two disagree.

    The sizes are dimension 0 of every tensor and array, the number of sequences in a `PackedSequence`, and the length
    of every list without tensors, arrays and packed sequences. Numbers, strings and tensors of shape () have no size.
    """
    sizes = leading_sizes(batch)
    return sizes.pop() if len(sizes) == 1 else None


def leading_sizes(batch: Nested) -> set[int]:
    """Return the distinct sizes of the parts of a batch; see `leading_size`."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return {batch.shape[0]} if batch.ndim else set()
    if isinstance(batch, PackedSequence):
        return {int(batch.batch_sizes[0])}
    if isinstance(batch, Mapping):
        children = list(cast("Mapping[Any, Any]", batch).values())
    elif isinstance(batch, (list, tuple)):
        children = list(cast("Sequence[Any]", batch))
        if not any(_has_parts(child) for child in children):
            return {len(children)} if children else set()
    elif is_dataclass(batch) and not isinstance(batch, type):
        children = [getattr(batch, f.name) for f in fields(batch)]
    else:
        return set()
    return set[int]().union(*map(leading_sizes, children))


def _has_parts(data: Nested) -> bool:
    if isinstance(data, torch.Tensor | np.ndarray | Mapping | list | tuple):
        return True
    return is_dataclass(data) and not isinstance(data, type)
