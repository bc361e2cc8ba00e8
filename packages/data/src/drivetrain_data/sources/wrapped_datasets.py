"""Look through the datasets that a user's dataset is made of: which are told the epoch, and which move as read."""

from collections.abc import Iterator
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate, default_convert

from drivetrain_data.randomness.generator_kinds import GENERATORS
from drivetrain_data.state.sampler_parts import LOOKED_THROUGH, parts_of, reachable

_MOST_PARTS = 10_000
_PLAIN = (TensorDataset, Subset, ConcatDataset, torch.Tensor, np.ndarray, list, tuple, range)


def epoch_parts(dataset: Any, collate: Any = None) -> tuple[Any, ...]:
    """Return the outermost objects with a `set_epoch` in a dataset, what it wraps, and a collate function.

    What such an object holds is its own affair: it may pass on another number than the epoch.
    """
    roots = [dataset, collate, getattr(collate, "__self__", None)]
    parts = (part for root in roots for part in reachable(root, _inside))
    found = {id(part): part for part in parts if _has_set_epoch(part)}
    return tuple(found.values())


def moves_as_read(dataset: Any) -> bool:
    """Return whether a dataset holds iterators or generators, so that another read may change those after it."""
    return holds_iterators(dataset) or any(isinstance(part, GENERATORS) for part in _parts_in(dataset))


def holds_iterators(dataset: Any) -> bool:
    """Return whether a dataset holds iterators, so that it may give its samples only once."""
    return any(hasattr(part, "__next__") and part is not dataset for part in _parts_in(dataset))


def may_draw(dataset: Any, collate: Any) -> bool:
    """Return whether code that may draw random numbers runs as a dataset is read and its samples are collated."""
    parts = reachable(dataset, _datasets_in)
    return collate not in (default_collate, default_convert) or any(
        type(part) not in _PLAIN for part in parts
    )


def _parts_in(dataset: Any) -> Iterator[Any]:
    parts = (part for one in reachable(dataset, _datasets_in) for part in parts_of(one))
    return islice(parts, _MOST_PARTS)


def _inside(part: Any) -> list[Any]:
    return [] if _has_set_epoch(part) or not isinstance(part, Dataset) else _datasets_in(part)


def _has_set_epoch(part: Any) -> bool:
    return callable(getattr(part, "set_epoch", None))


def _datasets_in(dataset: Any) -> list[Any]:
    if isinstance(dataset, Subset | ConcatDataset):  # of anything that can be indexed
        return [dataset.dataset] if isinstance(dataset, Subset) else list(cast("Any", dataset).datasets)
    found: list[Any] = []
    for value in getattr(dataset, "__dict__", {}).values():
        held: Any = value.values() if isinstance(value, dict) else value
        many = isinstance(value, list | tuple | dict) and len(cast("Any", value)) <= LOOKED_THROUGH
        found += [one for one in (held if many else [value]) if isinstance(one, Dataset)]
    return found
