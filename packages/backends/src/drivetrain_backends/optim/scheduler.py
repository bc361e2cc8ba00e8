"""A scheduler that counts optimizer steps: it advances only when its optimizer has stepped.

The numbers in a schedule mean optimizer steps, or epochs if the scheduler is called once an epoch. The number of
ranks, open accumulation windows and steps skipped for an overflow make no difference.
"""

import logging
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, Protocol, runtime_checkable

from drivetrain_backends.optim.optimizer import PreparedOptimizer, itself
from drivetrain_backends.optim.schedule_total import end_of, position_of, total_of, with_length_of

logger = logging.getLogger(__name__)


@runtime_checkable
class Scheduler(Protocol):
    """The interface of a learning-rate scheduler; every class of torch.optim.lr_scheduler has it."""

    optimizer: Any

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule by one."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedule."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the state of a saved schedule."""
        ...


class PreparedScheduler:
    """The user's scheduler, advanced by the steps of a prepared optimizer.

    A copy or pickle is that of the user's scheduler, with a copy of its optimizer; see `PreparedOptimizer`.

    Args:
        scheduler: The user's scheduler.
        optimizer: The prepared optimizer whose steps the scheduler counts.
        is_main: Whether this rank warns of a schedule that does not fit the training.

    Attributes:
        scheduler: The user's scheduler.
    """

    def __init__(self, scheduler: Scheduler, optimizer: PreparedOptimizer, *, is_main: bool = True) -> None:
        self.scheduler = scheduler
        self._end = end_of(scheduler) if is_main else None  # None also once its end is told
        self._is_main = is_main
        self._optimizer = optimizer
        self._seen_steps = optimizer.num_steps
        optimizer.schedule.is_prepared = True
        optimizer.schedule.forget()  # building a scheduler sets the rate

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance by one if the optimizer moved the parameters since the last call; else do nothing.

        Before training, every call advances the scheduler, with torch's warning. A schedule can thus be moved forward
        to the step at which a run resumes.

        Args:
            *args: Passed to the scheduler, such as the metric of ReduceLROnPlateau.
            **kwargs: Passed to the scheduler unchanged.
        """
        if self._optimizer.num_steps != self._seen_steps or self._optimizer.is_untouched:
            self._seen_steps = self._optimizer.num_steps
            self._optimizer.schedule.forget()
            self.scheduler.step(*args, **kwargs)
            if self._end is not None and position_of(self.scheduler) > self._end:
                self._tell_end()

    def _tell_end(self) -> None:
        """Warn once if the schedule was stepped past its end, unless the user has made it longer meanwhile."""
        self._end = end_of(self.scheduler)
        if self._end is None or position_of(self.scheduler) <= self._end:
            return
        rates = ", ".join(f"{float(group['lr']):.3g}" for group in self._optimizer.param_groups[:3])
        logger.warning(
            "%s is made for %s steps, and training goes on after them, now with learning rate %s: what it gives past "
            "its end is no part of the schedule. Make it for the steps of the whole training, which "
            "accelerator.num_steps(loader, epochs=...) returns",
            type(self.scheduler).__name__,
            self._end,
            rates,
        )
        self._end = None

    @property
    def lag(self) -> int:
        """The number of optimizer steps since the last call to `step`."""
        return self._optimizer.num_steps - self._seen_steps

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the user's scheduler."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict into the user's scheduler."""
        self.scheduler.load_state_dict(state_dict)

    def resume(self, saved: Mapping[str, Any], *, lag: int = 0) -> None:
        """Go on from a saved state; the optimizer's last `lag` steps are not yet counted. Called after it has loaded.

        The saved run may have made the schedule for another length than this program.
        """
        self._seen_steps = self._optimizer.num_steps - lag
        own, total = self.scheduler.state_dict(), total_of(self.scheduler)
        self.scheduler.load_state_dict(dict(saved))
        was = total_of(self.scheduler)
        if None not in (total, was) and total != was:
            self.scheduler.load_state_dict(with_length_of(saved, own))
            if self._is_main:
                logger.warning(
                    "%s is made for %s steps here, and for %s in the checkpoint, where it stands at step %s: it goes "
                    "on to %s. To end as it was saved, make it for %s",
                    *(type(self.scheduler).__name__, total, was, position_of(self.scheduler), total, was),
                )
        self._end = end_of(self.scheduler) if self._is_main else None

    def __reduce_ex__(self, protocol: Any) -> Any:
        del protocol
        self._optimizer.check_copyable()
        return itself, (self.scheduler,)

    def __copy__(self) -> Any:
        self._optimizer.check_copyable()
        return copy(self.scheduler)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not yet set
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __repr__(self) -> str:
        return f"PreparedScheduler({self.scheduler!r})"


def progress_of(
    optimizers: Sequence[PreparedOptimizer], schedulers: Sequence[PreparedScheduler]
) -> dict[str, list[Any]]:
    """Return the progress of a model's optimizers and schedulers, for the model's state."""
    return {
        "schedulers": [s.state_dict() for s in schedulers],
        "num_steps": [o.num_steps for o in optimizers],
        "scheduler_lags": [s.lag for s in schedulers],
    }


def check_numbers(
    state: Mapping[str, Any],
    optimizers: Sequence[PreparedOptimizer],
    schedulers: Sequence[PreparedScheduler],
    *,
    of: str,
) -> None:
    """Refuse a state with a different number of optimizers or schedulers."""
    for kind, own in (("optimizers", optimizers), ("schedulers", schedulers)):
        if len(state[kind]) != len(own):
            raise ValueError(
                f"the checkpoint holds {len(state[kind])} {kind} for {of}, and {len(own)} are prepared; prepare the "
                "same ones before load_state()"
            )


def load_progress(
    state: Mapping[str, Any], optimizers: Sequence[PreparedOptimizer], schedulers: Sequence[PreparedScheduler]
) -> None:
    """Load a result of `progress_of`."""
    for optimizer, steps in zip(optimizers, state["num_steps"], strict=True):
        optimizer.num_steps = steps
        optimizer.schedule.forget()
    for scheduler, saved, lag in zip(schedulers, state["schedulers"], state["scheduler_lags"], strict=True):
        scheduler.resume(saved, lag=lag)
