"""Cut a gathered value down to the samples that count, in the dataset's order. Pure, and the same on every rank."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from drivetrain_data._nested import Nested, map_leaves
from drivetrain_data.batch_plan import BatchPlan
from drivetrain_data.errors import TrimError


def trim(plan: BatchPlan | None, gathered: Nested, *, rows: Sequence[int] | None = None) -> Nested:
    """Leave out padding and replays from nested tensors that were concatenated rank by rank.

    Args:
        plan: What was known of the batch; None leaves all.
        gathered: Nested tensors. A tensor of shape (num_shards,) made of one number a rank loses those of ranks that
            hold no sample of their own. Leaves that are no tensors stay.
        rows: How many rows each rank gave, where the caller knows; by default they are one a sample held, or equally
            many on every rank.

    Returns:
        The same structure; each tensor holds exactly the real samples.

    Raises:
        TrimError: Which rows belong to which rank is not certain.
    """
    if plan is None or plan.is_whole or plan.real_counts is None:
        return gathered

    def cut(leaf: Any) -> Any:
        return _cut(plan, leaf, rows) if isinstance(leaf, torch.Tensor) else leaf

    return map_leaves(gathered, cut)


def trim_objects(plan: BatchPlan | None, by_rank: Sequence[Any]) -> list[Any]:
    """Leave out padding and replays from one object a rank.

    Args:
        plan: What was known of the batch; None leaves all.
        by_rank: Each rank's object, in rank order. Lists, if all are, hold one element a sample and are joined.

    Raises:
        TrimError: A rank's list has another length than its batch, and not all of it counts.
    """
    lists = all(isinstance(value, list) for value in by_rank)
    if plan is None or plan.is_whole or plan.real_counts is None:
        return [element for value in by_rank for element in value] if lists else list(by_rank)
    if not lists:
        return [value for value, count in zip(by_rank, plan.real_counts, strict=True) if count]
    kept: list[Any] = []
    for rank, value in enumerate(by_rank):
        kept.extend(value[: _rows_kept(plan, rank, len(value))])
    return kept


def _cut(plan: BatchPlan, tensor: torch.Tensor, rows: Sequence[int] | None) -> torch.Tensor:
    given = _rows_given(plan, tensor.shape[0]) if rows is None else rows
    starts = [0, *accumulate(given)]
    pieces = [
        tensor[start : start + _rows_kept(plan, rank, num_rows)]
        for rank, (start, num_rows) in enumerate(zip(starts[:-1], given, strict=True))
    ]
    return torch.cat(pieces)


def _rows_given(plan: BatchPlan, total: int) -> Sequence[int]:
    """How many rows each rank gave to a tensor of `total` rows."""
    assert plan.real_counts is not None
    count = len(plan.real_counts)
    sizes = plan.sizes
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
        f"{'+'.join(map(str, plan.real_counts))} count: which rows are whose is not certain. Gather one row a "
        "sample, or gather objects"
    )


def _rows_kept(plan: BatchPlan, rank: int, num_rows: int) -> int:
    """How many of the rows that a rank gave belong to samples that count."""
    assert plan.real_counts is not None
    real = plan.real_counts[rank]
    held = plan.sizes[rank] if plan.sizes is not None else max(real, 1)
    if real in (0, held):
        return num_rows if real else 0
    if num_rows == 1:
        return 1  # one number for the whole batch: the rank does hold samples of its own
    if num_rows % held == 0:
        return num_rows // held * real
    raise TrimError(
        f"rank {rank} gave {num_rows} rows or elements for a batch of {held} samples, of which {real} count: which "
        "ones is not certain. Gather one a sample"
    )
