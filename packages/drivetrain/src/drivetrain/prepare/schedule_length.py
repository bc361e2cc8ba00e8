"""The length of schedules in optimizer steps, compared with the length of training."""

import logging
from collections.abc import Iterable
from math import ceil
from typing import Any

from drivetrain.parts.parts import Parts
from drivetrain_backends import PreparedScheduler
from drivetrain_backends.optim.schedule_total import total_of
from drivetrain_data import ShardedLoader

logger = logging.getLogger(__name__)


def steps_of(epochs: float, num_batches: int, accumulation: int) -> int:
    """Return the number of optimizer steps in some epochs; each epoch closes its last window early.

    Args:
        epochs: The number of epochs, possibly fractional.
        num_batches: The number of batches of an epoch on each rank.
        accumulation: The number of micro-batches in a window.
    """
    whole = int(epochs)
    rest = round((epochs - whole) * num_batches, 6)  # 0.1 + 0.2 epochs of ten batches are three
    return whole * ceil(num_batches / accumulation) + ceil(ceil(rest) / accumulation)


def tell_unsharded_lengths(parts: Parts, loaders: Iterable[tuple[Any, ShardedLoader[Any]]]) -> None:
    """Warn once of each prepared schedule whose length fits a loader before, but not after, sharding.

    Called on all ranks, after each `prepare`. There is no warning if the length is a result of `num_steps`, or a
    whole number of epochs of a prepared loader whose `len` the program has read.

    Args:
        parts: The parts of the Accelerator.
        loaders: New pairs of a loader as the user built it, and the prepared one.
    """
    if parts.context.topology.world_size == 1 or not parts.context.topology.is_main:
        return
    prepared, accumulation = parts.prepared, parts.backend.window.next_num_micro_batches
    for own_loader, loader in loaders:
        prepared.lengths[loader] = _length(own_loader), _length(loader)
        loader.is_measured = False  # the program has not asked
    for scheduler in prepared.schedulers:
        total = total_of(scheduler.scheduler)
        if total is None or scheduler in prepared.told_schedulers or total in prepared.counted_steps:
            continue
        asked_for = [new for loader, (_, new) in prepared.lengths.items() if loader.is_measured]
        if any(_is_multiple(total, new, accumulation) for new in asked_for):
            continue
        for own, sharded in prepared.lengths.values():
            if own is None or sharded is None or sharded == own or not _is_multiple(total, own, accumulation):
                continue
            prepared.told_schedulers.add(scheduler)
            steps_in_epoch = ceil(sharded / accumulation)
            logger.warning(
                "%s is made for %s steps, which fits the loader's %s batches before prepare(). After prepare(), each "
                "rank has %s batches and an epoch has %s optimizer steps, so that the schedule spans %.3g epochs. "
                "Unless this is intended, prepare the loader first, and make the schedule for "
                "accelerator.num_steps(loader, epochs=...)",
                type(scheduler.scheduler).__name__,
                total,
                own,
                sharded,
                steps_in_epoch,
                total / steps_in_epoch,
            )
            break


def tell_unreached(schedulers: Iterable[PreparedScheduler]) -> None:
    """Warn of schedules that training did not complete. Called on rank 0."""
    for prepared in schedulers:
        scheduler: Any = prepared.scheduler
        total, at = total_of(scheduler), getattr(scheduler, "last_epoch", None)
        if total is not None and isinstance(at, int) and 0 < at < total:
            logger.warning(
                "training ended at step %s of a schedule of %s (%s), before its last learning rates. A schedule "
                "counts optimizer steps, whose number in an epoch depends on ranks, batch size and accumulation; "
                "accelerator.num_steps(loader, epochs=...) returns their number",
                at,
                total,
                type(scheduler).__name__,
            )


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _is_multiple(total: int, num_batches: int | None, accumulation: int) -> bool:
    """Return whether a schedule's total is a whole number of epochs, in batches or steps."""
    if num_batches is None:
        return False
    units = {num_batches, ceil(num_batches / accumulation), num_batches // accumulation}
    return any(unit > 1 and total % unit == 0 for unit in units)
