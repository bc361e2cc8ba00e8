"""A scheduler that counts optimizer steps: it advances only when its optimizer has stepped.

The number of ranks, open accumulation windows and steps skipped for an overflow do not count; the numbers in a
schedule mean optimizer steps, or epochs if the scheduler is called once an epoch.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, Protocol, runtime_checkable

from drivetrain_backends.optim.optimizer import PreparedOptimizer, itself


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

    A copy or pickle is one of the user's scheduler, with a copy of its optimizer; see `PreparedOptimizer`.

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
        optimizer.schedule.forget()  # building a scheduler sets the rate

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance by one if the optimizer moved the parameters since the last call; else do nothing.

        Before training it advances at every call, as without `prepare` and with torch's warning, so that a schedule
        can be moved forward to where a run resumes.

        Args:
            *args: Passed to the scheduler, such as the metric of ReduceLROnPlateau.
            **kwargs: Passed to the scheduler unchanged.
        """
        if self._optimizer.num_steps != self._seen_steps or self._optimizer.is_untouched:
            self._seen_steps = self._optimizer.num_steps
            self._optimizer.schedule.forget()
            self.scheduler.step(*args, **kwargs)

    @property
    def lag(self) -> int:
        """The number of optimizer steps since the last call to `step`."""
        return self._optimizer.num_steps - self._seen_steps

    def catch_up(self, lag: int) -> None:
        """Count the optimizer's last `lag` steps as not yet seen, after both were loaded."""
        self._seen_steps = self._optimizer.num_steps - lag

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the user's scheduler."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict into the user's scheduler."""
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
    """Return the progress of a model's optimizers and schedulers, as a part of its state."""
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
    """Refuse a state with a different number of optimizers or schedulers.

    Raises:
        ValueError: A number differs; the message says which.
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
    """Load a result of `progress_of`."""
    for optimizer, steps in zip(optimizers, state["num_steps"], strict=True):
        optimizer.num_steps = steps
        optimizer.schedule.forget()
    for scheduler, saved, lag in zip(schedulers, state["schedulers"], state["scheduler_lags"], strict=True):
        scheduler.load_state_dict(saved)
        scheduler.catch_up(lag)
