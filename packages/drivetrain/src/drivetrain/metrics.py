"""Weigh losses and gather results in an epoch's tail, from what every rank knows without communication."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from drivetrain.call_site import CallSites
from drivetrain_data import (
    AmbiguousLoaderError,
    BatchPlan,
    LoaderTracker,
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
    """Weigh a loss in an epoch's tail, where ranks hold different numbers of samples, or none.

    A mean is weighted by this rank's share of the samples, so that the mean over ranks is the mean over samples. A
    sum is already weighted by its count. A replayed batch has weight 0 in both cases, even if its loss is NaN.

    Args:
        loss: The loss of this rank, of shape ().
        count: The `count` argument of `backward`.
        batch: The plan of the current batch, the same on every rank.
        shard: The index of this rank's shard.

    Returns:
        The weighted loss and count.
    """
    if batch.replayed:
        nothing = torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, torch.zeros_like(loss))
        return nothing, None if count is None else 0.0
    return (loss, count) if count is not None else (loss * batch.weight(shard), None)


def gather(context: Context, data: Any, reading: LoaderTracker) -> Any:
    """Gather over ranks; in an epoch's tail, where sizes may differ, exchange the sizes too."""
    try:
        plan = reading.plan() or reading.left
    except AmbiguousLoaderError:  # two loaders are being read, and one is in its tail: assume the tail
        uneven = True
    else:
        uneven = plan is not None and not plan.equal_sizes
    return collectives.gather(context, data, uneven=uneven)


def gather_for_metrics(
    context: Context,
    data: Any,
    reading: LoaderTracker,
    *,
    readers: Sequence[int],
    as_objects: bool,
    loader: ShardedLoader[Any] | None,
    sites: CallSites,
) -> Any:
    """Gather results of the current batch, each sample once and in the dataset's order.

    Args:
        context: The context of this process.
        data: Nested tensors, or objects.
        reading: The loaders being read.
        readers: For each shard, in order, the rank whose data is taken: one of the ranks that share the shard.
        as_objects: Whether to gather a list of objects.
        loader: The loader of the batch, where it is ambiguous.
        sites: The finder of the loop around the call.
    """
    if loader is None and context.topology.world_size > 1:
        _check_prepared(sites, data)
    plan = reading.plan(loader)
    if loader is None:
        check_after_loop(reading.left, data)  # also inside an outer loop
    if not as_objects:
        # Data with a leaf that is not a tensor has one on every rank: all ranks gather it as objects.
        with suppress(LeafError):
            # The user may have dropped rows, so that batch sizes do not give their number: always exchange sizes.
            gathered, rows = collectives.gather_rows(context, data)
            shared = len(readers) < context.topology.world_size
            return trim(plan, gathered, rows=rows, readers=readers if shared else None)
    by_rank = collectives.gather_object(context, data)
    return trim_objects(plan, [by_rank[rank] for rank in readers])


def _check_prepared(sites: CallSites, data: Any) -> None:
    """Refuse rows computed in a loop over an unprepared loader, where each sample would count once per rank.

    Raises:
        UnpreparedLoaderError: The loop's loader was not prepared.
    """
    loop = sites.unprepared_loop() if holds_rows(data) else None
    if loop is not None:
        raise UnpreparedLoaderError(
            f"gather_for_metrics in the loop over `{loop.head}` ({loop.place}), which is a DataLoader that was not "
            "prepared: every rank reads all of it, and each sample would be gathered once per rank. Pass it to "
            "prepare() and loop over the result. If each rank's loader holds its own part of the data, gather() "
            "joins their rows as they are (drivetrain_state.gather_object for objects other than tensors)"
        )
