"""A scheduler that counts optimizer steps: it advances when its optimizer has.

Ranks do not multiply steps, an open accumulation window is no step, and neither is one skipped for an overflow; so
the numbers a schedule is written in mean optimizer steps, or epochs where it is called once an epoch.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, Protocol, runtime_checkable

from drivetrain_backends.optim.optimizer import PreparedOptimizer, itself


@runtime_checkable
class Scheduler(Protocol):
    """What is asked of a learning-rate scheduler; every one of torch.optim.lr_scheduler is of this shape."""

    optimizer: Any

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance by one."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Where the schedule stands."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a saved schedule stood."""
        ...


class PreparedScheduler:
    """Stands in for the user's scheduler.

    A copy or pickle of it is one of the user's scheduler, with a copy of its optimizer; see `PreparedOptimizer`.

    Args:
        scheduler: The user's scheduler.
        optimizer: The prepared optimizer whose steps it counts.

    Attributes:
        scheduler: The user's scheduler.
    """

    def __init__(self, scheduler: Scheduler, optimizer: PreparedOptimizer) -> None:
        self.scheduler = scheduler
        self._optimizer = optimizer
        self._seen_steps = optimizer.num_steps
        optimizer.schedule.is_prepared = True
        optimizer.schedule.forget()  # to make a scheduler sets the rate

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance by one if the optimizer moved the parameters since the last call; else do nothing.

        Before training it advances at every call, as without `prepare`, with torch's warning: so is a schedule wound
        forward to where a run goes on.

        Args:
            *args: Handed on, as ReduceLROnPlateau wants its metric.
            **kwargs: Handed on.
        """
        if self._optimizer.num_steps != self._seen_steps or self._optimizer.is_untouched:
            self._seen_steps = self._optimizer.num_steps
            self._optimizer.schedule.forget()
            self.scheduler.step(*args, **kwargs)

    @property
    def lag(self) -> int:
        """Optimizer steps since the last call to `step`."""
        return self._optimizer.num_steps - self._seen_steps

    def catch_up(self, lag: int) -> None:
        """Take `lag` of the optimizer's steps as still to be counted, after both were loaded."""
        self._seen_steps = self._optimizer.num_steps - lag

    def state_dict(self) -> dict[str, Any]:
        """The user's scheduler's own state."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the user's scheduler."""
        self.scheduler.load_state_dict(state_dict)

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
    """How far the optimizers and schedulers of a model are, as a part of its state."""
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
    """Refuse a state of another number of optimizers or schedulers.

    Raises:
        ValueError: It is one; the message says which.
    """
    for kind, own in (("optimizers", optimizers), ("schedulers", schedulers)):
        if len(state[kind]) != len(own):
            raise ValueError(
                f"the checkpoint holds {len(state[kind])} {kind} for {of}, and {len(own)} are prepared; prepare the "
                "same ones before load_state()"
            )


def load_progress(
    state: Mapping[str, Any],
    optimizers: Sequence[PreparedOptimizer],
    schedulers: Sequence[PreparedScheduler],
) -> None:
    """Take up what `progress_of` gave."""
    for optimizer, steps in zip(optimizers, state["num_steps"], strict=True):
        optimizer.num_steps = steps
        optimizer.schedule.forget()
    for scheduler, saved, lag in zip(schedulers, state["schedulers"], state["scheduler_lags"], strict=True):
        scheduler.load_state_dict(saved)
        scheduler.catch_up(lag)
