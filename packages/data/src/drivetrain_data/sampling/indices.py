"""Check the indices that samplers return against the dataset, and compute checksums that a resume compares."""

from collections.abc import Iterator, Sequence
from itertools import islice
from operator import index
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from drivetrain_data.errors import IndexRangeError
from drivetrain_data.randomness.permutation import Positions
from drivetrain_data.state.sampler_parts import length_of

_MOST_BEYOND = 2**20  # a sampler may give more than its length, but no more than twice that and these
_MOST_DRAWN = 2**27  # takes some 5 GB; a length may be a word for infinity
_PLAIN = (str, bytes, int, float, tuple)


def as_indices(items: list[Any], size: int | None, sampler: object) -> Positions | list[Any]:
    """Return a sampler's items: integers as an array, keys of other types unchanged.

    IndexRangeError if an index is outside the dataset of `size` samples, or an item cannot be a key. If `size` is
    None, no range is checked.
    """
    try:
        indices = np.fromiter(map(index, items), dtype=np.int64, count=len(items))
    except (TypeError, OverflowError):
        for number, item in enumerate(items):  # keys, of any other type
            if item is None or isinstance(item, float) or isinstance(item, int) != isinstance(items[0], int):
                raise IndexRangeError(
                    f"{type(sampler).__name__} gave {item!r} as its number {number}: a dataset is indexed with whole "
                    "numbers, or with keys throughout; let the sampler give one or the other"
                ) from None
            if isinstance(item, int) and size is not None and not -size <= item < size:
                raise outside_of(item, size, sampler) from None
        return items
    if size is not None:
        outside = np.flatnonzero((indices < -size) | (indices >= size))
        if outside.size:
            raise outside_of(int(indices[outside[0]]), size, sampler)
    return indices


def outside_of(given: int, size: int, sampler: object) -> IndexRangeError:
    """Return the error for an index that is not in the dataset."""
    return IndexRangeError(
        f"{type(sampler).__name__} gave index {given}, and the dataset has {size} samples (0 to {size - 1}); "
        "build the sampler for this dataset"
    )


def until_its_end(sampler: Any, what: str) -> Iterator[Any]:
    """Yield all items of a sampler; ValueError, naming `what` is drawn, if the sampler may never end."""
    length = length_of(sampler)
    if length is not None and length > _MOST_DRAWN:
        raise ValueError(
            f"{type(sampler).__name__} has a length of {length}, and {what} is drawn whole, which allows at most "
            f"{_MOST_DRAWN} items: delete its __len__, and its batches are drawn as they are read"
        )
    limit = min(_MOST_BEYOND + 2 * (length or 0), _MOST_DRAWN)
    items, end = iter(sampler), object()
    yield from islice(items, limit)
    if next(items, end) is not end:
        raise ValueError(
            f"{type(sampler).__name__} has a length of {length}, gave {limit} items and has not ended; {what} is "
            "drawn whole, and so must end: end it, or delete its __len__, and its batches are drawn as they are read"
        )


def checksum_of(drawn: npt.NDArray[Any] | Sequence[Any], before: int = 0) -> int:
    """Return a checksum of indices, weights or keys; it continues `before`, the checksum of the earlier items."""
    if isinstance(drawn, np.ndarray):
        return crc32(np.ascontiguousarray(drawn).data, before)
    return crc32(
        repr([key if isinstance(key, _PLAIN) else type(key).__name__ for key in drawn]).encode(), before
    )
