"""What samplers give: held against the dataset, and summed up to be held against what a resume gives."""

from collections.abc import Sequence
from operator import index
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from drivetrain_data.errors import IndexRangeError
from drivetrain_data.randomness.permutation import Positions

_PLAIN = (str, bytes, int, float, tuple)


def as_indices(items: list[Any], size: int | None, sampler: object) -> Positions | list[Any]:
    """What a sampler drew, as whole numbers, held against the dataset's length; or as it is, if it drew other keys.

    Args:
        items: What it drew.
        size: The samples of the dataset; None if that is not known.
        sampler: To name in errors.

    Raises:
        IndexRangeError: An index lies outside, or is none.
    """
    try:
        indices = np.fromiter(map(index, items), dtype=np.int64, count=len(items))
    except (TypeError, OverflowError):
        _check_keys(items, size, sampler)
        return items
    if size is not None:
        outside = np.flatnonzero((indices < -size) | (indices >= size))
        if outside.size:
            raise outside_of(int(indices[outside[0]]), size, sampler)
    return indices


def outside_of(given: int, size: int, sampler: object) -> IndexRangeError:
    """The error for an index that a dataset does not have."""
    return IndexRangeError(
        f"{type(sampler).__name__} gave index {given}, and the dataset has {size} samples (0 to {size - 1}); "
        "build the sampler for this dataset"
    )


def checksum_of(drawn: npt.NDArray[Any] | Sequence[Any], before: int = 0) -> int:
    """A checksum of indices, weights or keys, going on from that of what came before."""
    if isinstance(drawn, np.ndarray):
        return crc32(np.ascontiguousarray(drawn).data, before)
    return crc32(
        repr([key if isinstance(key, _PLAIN) else type(key).__name__ for key in drawn]).encode(), before
    )


def _check_keys(items: list[Any], size: int | None, sampler: object) -> None:
    """Keys of a dataset may be of any kind, but for nothing and fractions, and not mixed with indices."""
    for number, item in enumerate(items):
        if item is None or isinstance(item, float) or isinstance(item, int) != isinstance(items[0], int):
            raise IndexRangeError(
                f"{type(sampler).__name__} gave {item!r} as its number {number}: a dataset is indexed with whole "
                "numbers, or with keys throughout; let the sampler give one or the other"
            )
        if isinstance(item, int) and size is not None and not -size <= item < size:
            raise outside_of(item, size, sampler)
