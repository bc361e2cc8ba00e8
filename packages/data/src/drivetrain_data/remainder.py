"""Trim gathered values to the real samples, in the dataset's order. Pure functions with one result on every rank."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from drivetrain_data._nested import Nested, leaves_of, map_leaves
from drivetrain_data.errors import TrimError
from drivetrain_data.sampling.step_info import BatchPlan


def weigh(
    loss: torch.Tensor, count: torch.Tensor | float | None, batch: BatchPlan, shard: int
) -> tuple[torch.Tensor, torch.Tensor | float | None]:
    """Weigh a loss in an epoch's tail, where ranks hold different numbers of samples or no sample.

    A mean is weighted by this rank's share of the samples, so that the mean over ranks is the mean over samples. A
    sum is already weighted by its `count`, the argument of `backward`. A replayed batch has weight 0 in both cases,
    even if its loss is NaN. Loss and result are of shape ().
    """
    if batch.replayed:
        nothing = torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, torch.zeros_like(loss))
        return nothing, None if count is None else 0.0
    return (loss, count) if count is not None else (loss * batch.weight(shard), None)


def batch_sizes(data: Nested) -> Nested:
    """Replace each nested tensor by its number of rows, of shape (1,). Gather the result for the `rows` of `trim`."""

    def count(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.tensor([leaf.shape[0] if leaf.dim() else 1], device=leaf.device)

    return map_leaves(data, count)


def trim(plan: BatchPlan | None, gathered: Nested, *, rows: Nested | None = None) -> Nested:
    """Remove padding and replays from nested tensors that were concatenated in the order of the shards.

    Where several ranks read one shard, as in tensor parallelism, gather from one of them.

    Args:
        plan: The plan of the batch; None removes nothing.
        gathered: The nested tensors. A tensor of shape (num_shards,) with one number per rank loses the numbers of
            ranks without a real sample. Other leaves are kept.
        rows: The number of rows of each tensor on each rank: the gathered results of `batch_sizes`. By default every
            rank has one row per sample, or all ranks have equally many rows.

    Raises:
        TrimError: The rows cannot be attributed to ranks.
    """
    tail = _tail_of(plan)
    if tail is None:
        return gathered
    known = (leaf.tolist() for leaf in leaves_of(rows) if isinstance(leaf, torch.Tensor))

    def cut(leaf: Any) -> Any:
        return _cut(tail, leaf, next(known, None)) if isinstance(leaf, torch.Tensor) else leaf

    return map_leaves(gathered, cut)


def trim_objects(plan: BatchPlan | None, by_rank: Sequence[Any]) -> list[Any]:
    """Remove padding and replays from one object per rank.

    Args:
        plan: The plan of the batch; None removes nothing.
        by_rank: The objects, one for each shard, in shard order. If all objects are lists, they hold one element per
            sample and are concatenated. In other objects, the lists and tensors inside hold one element or row per
            sample.

    Raises:
        TrimError: A rank's batch holds padding or replays, and its object has no part that can be trimmed.
    """
    lists = all(isinstance(value, list) for value in by_rank)
    kept = list(by_rank)
    if (tail := _tail_of(plan)) is not None:
        kept = [
            _cut_object(tail, rank, value) for rank, value in enumerate(by_rank) if tail.real_counts[rank]
        ]
    return [element for value in kept for element in value] if lists else kept


def arrays_in(data: Nested) -> list[npt.NDArray[Any]]:
    """Return the NumPy arrays in nested data, each with a row per sample; empty if a list directly holds arrays."""
    found = [cast("npt.NDArray[Any]", leaf) for leaf in leaves_of(data) if isinstance(leaf, np.ndarray)]
    # A list of arrays, as of samples that differ in shape, holds one element per sample.
    return [] if _lists_arrays(data) else found


def with_arrays(data: Nested, others: Nested, arrays: Sequence[npt.NDArray[Any]]) -> Nested:
    """Return the structure of `data` with its arrays replaced by `arrays` and other leaves by those of `others`."""
    rest, found = iter(leaves_of(others)), iter(arrays)

    def choose(leaf: Any) -> Any:
        other = next(rest)
        return next(found) if isinstance(leaf, np.ndarray) else other

    return map_leaves(data, choose)


def without_arrays(data: Nested) -> Nested:
    """Return the structure of `data` with its arrays replaced by None."""
    return map_leaves(data, lambda leaf: None if isinstance(leaf, np.ndarray) else leaf)


def trim_arrays(plan: BatchPlan | None, by_shard: Sequence[Sequence[npt.NDArray[Any]]]) -> list[Any]:
    """Join each array over shards, in shard order, without padding and replays; an array of shape () is one row."""
    joined: list[Any] = []
    tail = _tail_of(plan)
    for parts in zip(*by_shard, strict=True):
        rows = [np.atleast_1d(part) for part in parts]
        if len({part.shape[1:] for part in rows}) > 1:
            raise TrimError(
                f"the ranks gave arrays of shapes {', '.join(str(part.shape) for part in rows)}: only the first "
                "dimension may differ. Pad them to one shape, or gather a list with one array per sample"
            )
        if tail is not None:
            same = len({len(part) for part in rows}) == 1
            rows = [
                part[: _count_rows(tail, i, len(part), may_be_number=same)] for i, part in enumerate(rows)
            ]
        are_masked = any(isinstance(part, np.ma.MaskedArray) for part in rows)
        joined.append((np.ma.concatenate if are_masked else np.concatenate)(rows))
    return joined


def _lists_arrays(data: Nested) -> bool:
    """Return whether a list anywhere in data directly holds an array."""
    if isinstance(data, list):
        children = cast("list[Any]", data)
        return any(isinstance(child, np.ndarray) or _lists_arrays(child) for child in children)
    if isinstance(data, Mapping):
        return any(map(_lists_arrays, cast("Mapping[Any, Any]", data).values()))
    return isinstance(data, tuple) and any(map(_lists_arrays, cast("tuple[Any, ...]", data)))


def check_after_loop(left: BatchPlan | None, data: Nested) -> None:
    """Raise TrimError if data may hold rows of repeated samples from the last batch of the loop that has ended."""
    tail = _tail_of(left)
    if tail is None or not holds_rows(data):
        return
    raise TrimError(
        f"this comes after the loop: in its last step only {'+'.join(map(str, tail.real_counts))} samples of the "
        "ranks counted, and the collected rows can no longer be attributed to them. Gather inside the loop, for each "
        "batch, and collect the results. For sums use reduce(); gather() keeps every row; loader= names the batch of "
        "a loop that is still running"
    )


def holds_rows(data: Nested) -> bool:
    """Return whether data may hold rows of samples: True if a leaf is neither a number nor a tensor of shape ()."""
    return any(
        leaf.dim() if isinstance(leaf, torch.Tensor) else not isinstance(leaf, int | float | complex)
        for leaf in leaves_of(data)
    )


class _Tail(NamedTuple):
    """The numbers of samples of each shard in a step that may need trimming; see `BatchPlan`."""

    real_counts: tuple[int, ...]
    sizes: tuple[int, ...] | None


def _tail_of(plan: BatchPlan | None) -> _Tail | None:
    """Return the numbers of samples in a step; None if the step is known to need no trimming."""
    if plan is None or plan.is_whole or plan.real_counts is None:
        return None
    return _Tail(plan.real_counts, plan.sizes)


def _cut_object(tail: _Tail, rank: int, value: Any) -> Any:
    """Return the part of a rank's object that belongs to real samples."""
    if tail.sizes is None or tail.real_counts[rank] == tail.sizes[rank]:
        return value
    if isinstance(value, list) or (isinstance(value, torch.Tensor | np.ndarray) and value.ndim):
        rows = cast("list[Any]", value)
        return rows[: _count_rows(tail, rank, len(rows))]
    if isinstance(value, dict):
        return {key: _cut_object(tail, rank, part) for key, part in cast("dict[Any, Any]", value).items()}
    if type(value) is tuple:
        return tuple(_cut_object(tail, rank, part) for part in cast("tuple[Any, ...]", value))
    if isinstance(value, torch.Tensor | int | float | complex):
        return value  # one number for the whole batch
    raise TrimError(
        f"rank {rank} gave a {type(value).__name__} for a batch of {tail.sizes[rank]} samples, of which "
        f"{tail.real_counts[rank]} count: its parts cannot be attributed to samples. Gather lists of one element "
        "per sample"
    )


def _cut(tail: _Tail, tensor: torch.Tensor, rows: Sequence[int] | None) -> torch.Tensor:
    if rows is None:
        rows = _infer_rows(tail, tensor.shape[0])
    starts = [0, *accumulate(rows)]
    # With different numbers of rows, a single row need not be a number for the whole batch.
    same = len(set(rows)) == 1
    pieces: list[torch.Tensor] = []
    for rank, start in enumerate(starts[:-1]):
        kept = _count_rows(tail, rank, rows[rank], may_be_number=same)
        pieces.append(tensor[start : start + kept])
    return torch.cat(pieces)


def _infer_rows(tail: _Tail, total: int) -> Sequence[int]:
    """Infer how many of the `total` rows of a gathered tensor came from each rank."""
    count, sizes = len(tail.real_counts), tail.sizes
    if sizes is not None and total == sum(sizes):
        return sizes
    by_rank = [total // count] * count if total % count == 0 else None
    by_sample = None
    if sizes is not None and total % sum(sizes) == 0:
        by_sample = [size * (total // sum(sizes)) for size in sizes]
    if by_rank is not None and by_sample in (None, by_rank) and sizes is not None:
        return by_rank
    if by_sample is not None and by_rank is None:
        return by_sample
    held = "an unknown number of" if sizes is None else f"{'+'.join(map(str, sizes))}"
    raise TrimError(
        f"a gathered tensor has {total} rows, and the {count} shards held {held} samples, of which "
        f"{'+'.join(map(str, tail.real_counts))} count: the rows cannot be attributed to samples. Gather one "
        "row per sample, or gather objects"
    )


def _count_rows(tail: _Tail, rank: int, num_rows: int, *, may_be_number: bool = True) -> int:
    """Return how many of a rank's rows belong to real samples."""
    real = tail.real_counts[rank]
    held = tail.sizes[rank] if tail.sizes is not None else max(real, 1)
    if real in (0, held):
        return num_rows if real else 0
    if num_rows == 1 and may_be_number:
        return 1  # one number for the whole batch: the rank holds real samples
    if num_rows % held == 0:
        return num_rows // held * real
    raise TrimError(
        f"rank {rank} gave {num_rows} rows or elements for a batch of {held} samples, of which {real} count: they "
        "cannot be attributed to samples. Gather one per sample"
    )
