"""The prepared form of a scheduler. As in Accelerate, each optimizer step advances it once for each process."""

from collections.abc import Sequence
from typing import Any

from drivetrain_accelerate.compat import count_call, num_calls
from drivetrain_accelerate.plain_values import shown
from drivetrain_accelerate.states.gradient_state import GradientState
from drivetrain_accelerate.states.partial_state import PartialState
from drivetrain_accelerate.training.stepped_optimizer import AcceleratedOptimizer


class AcceleratedScheduler:
    """The user's scheduler, advanced when the optimizers step."""

    def __init__(
        self, scheduler: Any, optimizers: Any, step_with_optimizer: bool = True, split_batches: bool = False
    ) -> None:
        self.scheduler = scheduler
        several = isinstance(optimizers, Sequence)
        self.optimizers: list[Any] = list(optimizers) if several else [optimizers]  # pyright: ignore[reportUnknownArgumentType]
        self.split_batches = split_batches
        self.step_with_optimizer = step_with_optimizer
        self.gradient_state = GradientState()

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance if the optimizers have stepped; do nothing after a skipped step or in an open window."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            if self.gradient_state.adjust_scheduler:
                count_call(self.scheduler)
            return
        if any(isinstance(each, AcceleratedOptimizer) and each.step_was_skipped for each in self.optimizers):
            return
        for _ in range(1 if self.split_batches else PartialState().num_processes):
            # A schedule of a fixed number of steps must not be asked beyond its end.
            last = getattr(self.scheduler, "total_steps", None)
            if last is None or num_calls(self.scheduler) <= last:
                self.scheduler.step(*args, **kwargs)

    get_last_lr = shown("scheduler.get_last_lr", "Return the learning rates of the groups.")
    state_dict = shown("scheduler.state_dict", "Return the state of the user's scheduler.")
    load_state_dict = shown("scheduler.load_state_dict", "Load a state into the user's scheduler.")
    get_lr = shown("scheduler.get_lr", "Return what the user's scheduler computes for the groups.")
    print_lr = shown("scheduler.print_lr", "Print as the user's scheduler does.")

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not yet set
            raise AttributeError(name)
        return getattr(self.scheduler, name)
