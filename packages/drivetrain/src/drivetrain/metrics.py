"""What an epoch's tail means for losses and for gathering: decided on what every rank knows without asking."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from drivetrain_data import ActiveLoaders, BatchPlan, ShardedLoader, trim, trim_objects
from drivetrain_state import Context, collectives


def weigh(
    loss: Tensor, count: Tensor | float | None, batch: BatchPlan
) -> tuple[Tensor, Tensor | float | None]:
    """Weigh a loss of the tail, where ranks hold different numbers of samples, or none.

    A mean is weighed by this rank's share of the samples, so that the mean over ranks is the mean over samples. A sum
    counts what it counts. A replayed batch weighs nothing either way, and its NaN stays out.

    Args:
        loss: Shape ().
        count: What `backward` was given.
        batch: What every rank knows of the current batch.

    Returns:
        The loss and count to go on with.
    """
    if batch.replayed:
        nothing = torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, torch.zeros_like(loss))
        return nothing, None if count is None else 0.0
    if count is not None:
        return loss, count
    return loss * (batch.real[batch.index] * len(batch.real) / sum(batch.real)), None


def gather(context: Context, data: Any, reading: ActiveLoaders) -> Any:
    """Gather over ranks; in a tail, where every rank knows that sizes differ, by their sizes."""
    plan = reading.plan()
    uneven = plan is not None and not plan.even
    return collectives.gather(context, data, uneven=uneven)


def gather_for_metrics(
    context: Context,
    data: Any,
    reading: ActiveLoaders,
    *,
    as_objects: bool,
    loader: ShardedLoader[Any] | None,
) -> Any:
    """Gather what was computed from the current batch, each sample once and in the dataset's order."""
    plan = reading.plan(loader)
    if as_objects or not all(isinstance(leaf, Tensor) for leaf in tree_leaves(data)):
        by_rank = collectives.gather_object(context, data if isinstance(data, list) else [data])
        return trim_objects(by_rank, plan) if plan is not None else [one for rank in by_rank for one in rank]
    if plan is None or plan.even:
        return collectives.gather(context, data)
    return trim(collectives.gather(context, data, uneven=True), plan)
