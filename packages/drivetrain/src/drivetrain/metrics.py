"""What an epoch's tail means for losses and for gathering: decided on what every rank knows without asking."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from drivetrain.call_site import CallSites
from drivetrain_data import (
    ActiveLoaders,
    AmbiguousLoaderError,
    BatchPlan,
    ShardedLoader,
    UnpreparedLoaderError,
    check_after_loop,
    holds_rows,
    trim,
    trim_objects,
)
from drivetrain_state import Context, LeafError
from drivetrain_state.collectives import operations as collectives


def weigh(
    loss: Tensor, count: Tensor | float | None, batch: BatchPlan, shard: int
) -> tuple[Tensor, Tensor | float | None]:
    """Weigh a loss of the tail, where ranks hold different numbers of samples, or none.

    A mean is weighed by this rank's share of the samples, so that the mean over ranks is the mean over samples. A sum
    counts what it counts. A replayed batch weighs nothing either way, and a NaN of its loss stays out.

    Args:
        loss: Shape ().
        count: What `backward` was given.
        batch: What every rank knows of the current batch.
        shard: Which of its shards is this rank's.

    Returns:
        The loss and count to go on with.
    """
    if batch.replayed:
        nothing = torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, torch.zeros_like(loss))
        return nothing, None if count is None else 0.0
    return (loss, count) if count is not None else (loss * batch.weight(shard), None)


def gather(context: Context, data: Any, reading: ActiveLoaders) -> Any:
    """Gather over ranks; in a tail, where every rank knows that sizes may differ, by their sizes."""
    try:
        plan = reading.plan() or reading.left
    except AmbiguousLoaderError:  # of two loaders read side by side, one is in its tail: either may be meant
        uneven = True
    else:
        uneven = plan is not None and not plan.equal_sizes
    return collectives.gather(context, data, uneven=uneven)


def gather_for_metrics(
    context: Context,
    data: Any,
    reading: ActiveLoaders,
    *,
    readers: Sequence[int],
    as_objects: bool,
    loader: ShardedLoader[Any] | None,
    sites: CallSites,
) -> Any:
    """Gather what was computed from the current batch, each sample once and in the dataset's order.

    Args:
        context: This process among the others.
        data: Nested tensors, or objects.
        reading: The loaders being read.
        readers: For each shard, in order, the rank whose data is taken; of ranks that share a shard, one.
        as_objects: Gather a list of objects.
        loader: Whose batch it is, where it is not clear.
        sites: Which loops calls stand in.
    """
    if loader is None and context.topology.world_size > 1:
        _check_prepared(sites, data)
    plan = reading.plan(loader)
    if loader is None:
        check_after_loop(reading.left, data)  # within an outer loop too
    if not as_objects:
        # What holds something that is no tensor does so on every rank alike: all of it goes as objects.
        with suppress(LeafError):
            # What a step holds says little of what a user made of it, rows left out say: sizes are always exchanged.
            gathered, rows = collectives.gather_rows(context, data)
            shared = len(readers) < context.topology.world_size
            return trim(plan, gathered, rows=rows, readers=readers if shared else None)
    by_rank = collectives.gather_object(context, data)
    return trim_objects(plan, [by_rank[rank] for rank in readers])


def _check_prepared(sites: CallSites, data: Any) -> None:
    """Refuse rows computed in a loop over a loader that every rank reads whole: each sample would count once a rank.

    Raises:
        UnpreparedLoaderError: They were.
    """
    loop = sites.unprepared_loop() if holds_rows(data) else None
    if loop is not None:
        raise UnpreparedLoaderError(
            f"gather_for_metrics in the loop over `{loop.head}` ({loop.place}), which is a DataLoader that was not "
            "prepared: every rank reads all of it, and each sample would come once from every rank. Pass it to "
            "prepare() and loop over what that returns. If each rank's loader holds a part of its own, gather() "
            "joins their rows as they are (drivetrain_state.gather_object those that are no tensors)"
        )
