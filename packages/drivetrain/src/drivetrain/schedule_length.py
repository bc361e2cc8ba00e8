"""The length of schedules in optimizer steps, compared with the length of training."""

import logging
from collections.abc import Iterable, Mapping
from math import ceil
from typing import Any, cast

from drivetrain.compat import milestones_of, schedulers_in
from drivetrain.parts import HasParts, Parts
from drivetrain_backends import PreparedScheduler
from drivetrain_data import ShardedLoader

logger = logging.getLogger(__name__)


class Schedules(HasParts):
    """The part of an Accelerator that counts steps for schedules."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._has_ended = False

    def _end_schedules(self, *, by_error: bool = False) -> None:
        """Warn once of schedules that training did not complete, unless it ended with an error."""
        if not by_error and not self._has_ended and self.context.topology.is_main:
            tell_unreached(self._parts.prepared.schedulers)
        self._has_ended = True

    def num_steps(
        self, loader: ShardedLoader[Any], *, epochs: float | None = None, samples: int | None = None
    ) -> int:
        """Return the number of optimizer steps in training, for a schedule; the same on all ranks.

        Args:
            loader: A prepared loader; an epoch's last batch closes its window.
            epochs: The number of epochs to train; a fraction of an epoch counts by its batches.
            samples: The number of samples to train on, over all ranks, instead of `epochs`.

        Raises:
            TypeError: The loader is not prepared, or not exactly one of `epochs` and `samples` is given.
            ValueError: The loader's length is unknown, or the number is not above 0.
        """
        if not isinstance(loader, ShardedLoader):  # pyright: ignore[reportUnnecessaryIsInstance] a user may give any
            raise TypeError(
                f"num_steps({type(loader).__name__}): pass the loader that prepare() returned; before prepare(), the "
                "batches of all ranks are counted, and an epoch has fewer steps on more ranks"
            )
        if (epochs is None) == (samples is None):
            raise TypeError(f"num_steps(epochs={epochs!r}, samples={samples!r}): give one of the two")
        amount = cast("float", samples if epochs is None else epochs)
        if not amount > 0:
            raise ValueError(f"num_steps(epochs={epochs!r}, samples={samples!r}): must be above 0")
        accumulation = self._parts.backend.window.next_num_micro_batches
        try:
            num_batches, num_samples = len(loader), len(loader.dataset)
        except TypeError as error:
            raise ValueError(
                "num_steps(): the length of this loader is not known; write the schedule in optimizer steps"
            ) from error
        if epochs is not None:
            return steps_of(epochs, num_batches, accumulation)
        whole, rest = divmod(cast("int", samples), num_samples)
        per_batch = loader.total_batch_size or num_samples / num_batches
        batches = min(num_batches, ceil(rest / per_batch))
        return steps_of(whole, num_batches, accumulation) + ceil(batches / accumulation)


def steps_of(epochs: float, num_batches: int, accumulation: int) -> int:
    """Return the number of optimizer steps of some epochs, each of which closes its last window early.

    Args:
        epochs: The number of epochs, possibly fractional.
        num_batches: The number of batches of an epoch on each rank.
        accumulation: The number of micro-batches in a window.
    """
    whole = int(epochs)
    rest = round((epochs - whole) * num_batches, 6)  # 0.1 + 0.2 epochs of ten batches are three
    return whole * ceil(num_batches / accumulation) + ceil(ceil(rest) / accumulation)


def total_of(scheduler: Any) -> int | None:
    """Return the number of steps that a scheduler is made for; None if it does not expose them."""
    parts, milestones = schedulers_in(scheduler), milestones_of(scheduler)
    if parts and milestones:
        last = total_of(parts[-1])
        return None if last is None else milestones[-1] + last
    if parts:
        return max((total for one in parts if (total := total_of(one)) is not None), default=None)
    for attribute in ("total_steps", "T_max", "total_iters"):
        if isinstance(total := getattr(scheduler, attribute, None), int):
            return total
    for function in getattr(scheduler, "lr_lambdas", ()):  # partial functions in transformers
        keywords: Mapping[str, Any] = getattr(function, "keywords", {})
        if isinstance(total := keywords.get("num_training_steps"), int):
            return total
    return None


def tell_unsharded_lengths(parts: Parts, loaders: Iterable[tuple[Any, ShardedLoader[Any]]]) -> None:
    """Warn of prepared schedules as long as loaders were before they were prepared. Called on all ranks.

    Args:
        parts: The parts of the Accelerator.
        loaders: Pairs of a loader as the user built it, and the prepared one.
    """
    if parts.context.topology.world_size == 1 or not parts.context.topology.is_main:
        return
    accumulation = parts.backend.window.next_num_micro_batches
    pairs = [(_length(own), _length(sharded)) for own, sharded in loaders]
    for scheduler in parts.prepared.schedulers:
        total = total_of(scheduler.scheduler)
        for own, sharded in pairs:
            if total is None or own is None or sharded is None or own == sharded:
                continue
            if not _is_multiple(total, own, accumulation):
                continue
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
                "counts optimizer steps, and an epoch has fewer of them on more ranks; "
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


def _is_multiple(total: int, num_batches: int, accumulation: int) -> bool:
    """Return whether a total is that of a whole number of epochs, in batches or steps."""
    units = {num_batches, ceil(num_batches / accumulation), num_batches // accumulation}
    return any(unit > 1 and total % unit == 0 for unit in units)
