"""Detection of schedulers that were not prepared and advance with every micro-batch, not every optimizer step.

There are two signs. A learning rate changes inside an open window; or, if rates stay constant for many steps, a torch
scheduler advances. Such schedulers are found by one search through all objects of the process.
"""

import gc
from collections.abc import Sequence
from typing import Any
from weakref import ref

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from drivetrain_backends.compat import version_of
from drivetrain_backends.errors import SchedulerError


class ScheduleGuard:
    """A guard that refuses schedules that advance inside an accumulation window.

    `optimizers` are the user's optimizer and its wrapper, because a scheduler may be built over either.
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        self.has_begun = False  # whether a window of several micro-batches has begun
        # Whether a prepared scheduler sets the rates; others are then not searched for.
        self.is_prepared = False
        self._optimizers = tuple(ref(optimizer) for optimizer in optimizers)
        self._schedulers: list[ref[LRScheduler]] = []
        self._looked_at: bool | None = None  # the value of `is_scheduled` at the last search for schedulers
        self._rates: list[object] | None = None  # of the open window
        self._progress: list[object] = []

    def begin(self, groups: Sequence[dict[str, Any]]) -> None:
        """Record the rates and schedules at the start of a window, if the optimizer has a schedule."""
        self.has_begun = True
        self._rates = None
        # Most schedulers record their initial rate.
        is_scheduled = any("initial_lr" in group for group in groups)
        if is_scheduled is not self._looked_at:
            self._looked_at = is_scheduled
            self._schedulers = [] if self.is_prepared else self._find()
        if is_scheduled or self._schedulers:
            self._rates, self._progress = _rates_of(groups), self._progress_now()

    def check(self, optimizer: Optimizer) -> None:
        """Refuse a rate or a schedule that has moved since the open window began."""
        if self._rates is None:
            return
        now = _rates_of(optimizer.param_groups)
        if now != self._rates:
            what = f"the learning rate of {type(optimizer).__name__} changed"
            how = f", from {_format_rates(self._rates)} to {_format_rates(now)}"
        elif self._progress_now() != self._progress:
            what, how = f"the learning-rate schedule of {type(optimizer).__name__} advanced", ""
        else:
            return
        raise SchedulerError(
            f"{what} inside an accumulation window{how}: its scheduler was left out of prepare(), and advances with "
            "every micro-batch and not with every optimizer step. Pass the scheduler to prepare() with its "
            "optimizer, or after it; or call scheduler.step() only where accelerator.sync_gradients is true, "
            "after optimizer.step(). Rates that are set by hand are set between windows"
        )

    def forget(self) -> None:
        """Forget the record, so that the schedule may move once, as when a state is loaded."""
        self._rates = None

    def _find(self) -> list[ref[LRScheduler]]:
        """Return torch's schedulers of these optimizers by a search, because optimizers keep no list of schedulers.

        The search takes about 50 ms, once. It misses objects hidden by `gc.freeze`; changing rates still reveal them.
        """
        own = [optimizer() for optimizer in self._optimizers]
        # Objects refer to their class. gc.get_objects() would hold tuples that other threads are making from
        # generators, which CPython then fails to finish (SystemError).
        kinds: list[type[Any]] = [LRScheduler]
        for kind in kinds:  # grows by the subclasses
            kinds += kind.__subclasses__()
        candidates = gc.get_referrers(*kinds)
        schedulers = [one for one in candidates if issubclass(type(one), LRScheduler)]
        return [
            ref(one) for one in schedulers if any(getattr(one, "optimizer", None) is each for each in own)
        ]

    def _progress_now(self) -> list[object]:
        schedulers = [known() for known in self._schedulers]
        return [None if one is None else one.last_epoch for one in schedulers]


def _rates_of(groups: Sequence[dict[str, Any]]) -> list[object]:
    """Return values that identify the rates without reading a tensor, which may be on a device."""
    rates = [group["lr"] for group in groups if "lr" in group]
    return [(id(rate), version_of(rate)) if isinstance(rate, Tensor) else rate for rate in rates]


def _format_rates(rates: Sequence[object]) -> str:
    numbers = ["a tensor" if isinstance(rate, tuple) else f"{rate:.6g}" for rate in rates[:3]]
    return ", ".join(numbers) + (", ..." if len(rates) > 3 else "")
