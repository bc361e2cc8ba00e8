"""Cut rows that were gathered in an epoch's tail to those of real samples. Pure functions."""

from typing import Any

import torch

from drivetrain_accelerate.compat import map_nested
from drivetrain_data import BatchPlan


def real_rows(plan: BatchPlan | None, gathered: Any, rows: Any, *, batch_size: int | None) -> Any:
    """Keep of each rank's rows those that belong to real samples.

    Args:
        plan: The plan of the batch; None keeps everything.
        gathered: Nested tensors, concatenated in rank order.
        rows: The number of rows of each tensor on each rank: the same structure, of tensors of shape (world_size,).
        batch_size: The number of samples of a full batch on one rank; None if unknown.
    """
    if plan is None or plan.real_counts is None or (plan.is_whole and not plan.is_last):
        return gathered
    real, sizes = plan.real_counts, plan.sizes or plan.real_counts

    def cut(leaf: torch.Tensor, of_ranks: torch.Tensor) -> torch.Tensor:
        given: list[int] = of_ranks.tolist()
        kept = [kept_rows(*each, full=batch_size) for each in zip(given, sizes, real, strict=True)]
        if kept == given:
            return leaf
        return torch.cat([part[:count] for part, count in zip(leaf.split(given), kept, strict=True)])

    return map_nested(cut, gathered, rows)


def kept_rows(num_rows: int, size: int, real: int, *, full: int | None) -> int:
    """Return how many of a rank's rows belong to real samples; they come first.

    Args:
        num_rows: The rows that the rank gave.
        size: The samples that its batch holds, repeats included.
        real: The real samples among them.
        full: The samples of a full batch; a program may give a row for each of these, such as a mean loss repeated.
    """
    if num_rows in (size, full):
        return min(num_rows, real)
    if size and num_rows % size == 0:  # several rows a sample
        return num_rows // size * real
    return num_rows  # the program chose them
