"""Search a user's dataset for parts with a `set_epoch` and for iterators, which advance when they are read."""

from collections.abc import Iterator
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
)

from drivetrain_data.randomness.generators import is_generator
from drivetrain_data.state.sampler_parts import held_by, is_apart, reachable

_MOST_PARTS = 10_000
# Loaders and models are read by others, and a class is no object that was told an epoch.
_APART = (DataLoader, torch.nn.Module, type)
_PLAIN = (TensorDataset, Subset, ConcatDataset, torch.Tensor, np.ndarray, list, tuple, range)


def epoch_parts(*roots: Any, collate: Any = None) -> tuple[Any, ...]:
    """Return the outermost objects with a `set_epoch` in datasets and samplers; also such a collate function."""
    # What such an object holds is its own affair: it may pass on another number than the epoch.
    inside: list[Any] = []
    for root in roots:
        parts = reachable(
            root, lambda part, root=root: [] if _has_set_epoch(part) else _held_by_data(part, root)
        )
        inside += islice(parts, _MOST_PARTS)
    parts = (*inside, collate, getattr(collate, "__self__", None))
    return tuple({id(part): part for part in parts if _has_set_epoch(part)}.values())


def moves_as_read(dataset: Any) -> bool:
    """Return whether a dataset holds iterators or generators, so that a read may change later reads."""
    return holds_iterators(dataset) or any(map(is_generator, _parts_in(dataset)))


def holds_iterators(dataset: Any) -> bool:
    """Return whether a dataset holds iterators, so that it may give its samples only once."""
    return any(hasattr(part, "__next__") and part is not dataset for part in _parts_in(dataset))


def may_draw(dataset: Any, collate: Any) -> bool:
    """Return whether reading a dataset or collating its samples runs code that may draw random numbers."""
    parts = reachable(dataset, _wrapped)
    return collate not in (default_collate, default_convert) or any(
        type(part) not in _PLAIN for part in parts
    )


def _parts_in(dataset: Any) -> Iterator[Any]:
    def inside(part: Any) -> list[Any]:
        return _held_by_data(part, dataset) if is_apart(part) else held_by(part)

    return islice(reachable(dataset, inside), _MOST_PARTS)


def _has_set_epoch(part: Any) -> bool:
    return not isinstance(part, type) and callable(getattr(part, "set_epoch", None))


def _held_by_data(part: Any, root: Any) -> list[Any]:
    """Return the objects that the root, a dataset, a sampler or a container holds; empty for other parts."""
    if isinstance(part, Subset | ConcatDataset):  # of anything that can be indexed
        return _wrapped(part)
    kind = type(part)
    is_data = not isinstance(part, _APART) and (hasattr(kind, "__getitem__") or hasattr(kind, "__iter__"))
    return held_by(part) if part is root or is_data else []


def _wrapped(dataset: Any) -> list[Any]:
    if isinstance(dataset, Subset):
        return [cast("Any", dataset).dataset]
    return list(cast("Any", dataset).datasets) if isinstance(dataset, ConcatDataset) else []
