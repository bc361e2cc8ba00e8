"""A wrapper of the user's optimizer: steps go through the backend, all other calls to the user's optimizer."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from drivetrain_backends.errors import AccumulationError
from drivetrain_backends.optim.schedule_guard import ScheduleGuard


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The outcome of a call to `step`.

    Attributes:
        stepped: Whether the optimizer moved the parameters.
        skipped: Whether the window was closed but the step was skipped because a gradient was not finite: in fp16, or
            where the settings say so.
        grad_norm: The global gradient norm before clipping, shape (); None if none was computed for this step.
    """

    stepped: bool
    skipped: bool
    grad_norm: Tensor | None = None


class Stepper(Protocol):
    """The part of `Prepared` that an optimizer needs to step."""

    def step(self, optimizer: Optimizer) -> StepResult:
        """Step one of the model's optimizers."""
        ...

    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        """Clear the gradients of one optimizer."""
        ...


class _Released:
    """The stepper of an optimizer whose backend is closed; it refuses every step."""

    def step(self, optimizer: Optimizer) -> StepResult:
        """Refuse to step."""
        raise AccumulationError(
            f"step() of {type(optimizer).__name__} after free_memory(), end_training(), or the prepare() of another "
            "Accelerator that took its model: the backend of its model is closed; prepare() model and optimizer "
            "again, or step the optimizer that you built"
        )

    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        """Clear the gradients; no window is left to hold them."""
        optimizer.zero_grad(set_to_none)


class PreparedOptimizer(Optimizer):
    """The user's optimizer with the same groups and state, whose `step` and `zero_grad` follow the window.

    Args:
        optimizer: The user's optimizer, over the prepared parameters.
        prepared: The model that the optimizer trains.

    A copy (`copy.copy`, `copy.deepcopy`) or pickle is that of the user's optimizer, independent of any window. It can
    serve as a snapshot, or be prepared separately.

    Attributes:
        optimizer: The user's optimizer.
        num_steps: The number of steps that moved the parameters; skipped steps and open windows do not count.
        last_result: The result of the last call to `step`; None before the first.
        is_cleared: Whether `zero_grad` was called since this was set to False.
        before_step: A callback before each step, dropped once it returns True.
        schedule: The guard that refuses schedules that advance inside a window.
        on_step: Callbacks at the end of each window, whether the parameters moved or the step was skipped.
    """

    def __init__(self, optimizer: Optimizer, prepared: Stepper) -> None:
        # Optimizer.__init__ is not called: groups, state and defaults stay in the user's optimizer.
        self.optimizer = optimizer
        self.prepared: Stepper = prepared
        self.num_steps = 0
        self.last_result: StepResult | None = None
        self.is_cleared = False
        self.before_step: Callable[[], bool] | None = None
        self.on_step: Sequence[Callable[[], None]] = ()
        self.schedule = ScheduleGuard(self, optimizer)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step if the accumulation window is closed. Called on all ranks.

        Raises:
            ValueError: A closure is given, whose backward would bypass the backend.
        """
        if closure is not None:
            raise ValueError(
                "step(closure): a closure computes gradients outside accelerator.backward, where they are neither "
                "scaled nor reduced; step the optimizer without one, or leave it out of prepare()"
            )
        if self.before_step is not None and self.before_step():
            self.before_step = None
        result = self.prepared.step(self.optimizer)
        self.last_result = result
        if result.stepped:
            self.num_steps += 1
        elif not result.skipped:
            return
        for call in self.on_step:
            call()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; keep those accumulated in an open window."""
        self.prepared.zero_grad(self.optimizer, set_to_none=set_to_none)
        self.is_cleared = True

    @property
    def was_skipped(self) -> bool:
        """True if the last call to `step` was skipped because a gradient was not finite."""
        return self.last_result is not None and self.last_result.skipped

    def release(self) -> None:
        """Release the model and refuse `step` from now on, because the backend is closed."""
        self.prepared = _Released()
        self.before_step, self.on_step = None, ()

    @property
    def is_released(self) -> bool:
        """True if the backend that prepared this optimizer is closed: the optimizer may be prepared again."""
        return isinstance(self.prepared, _Released)

    @property
    def is_untouched(self) -> bool:
        """True if no window of several micro-batches has begun and `step` was never called."""
        return not self.schedule.has_begun and self.last_result is None and self.num_steps == 0

    def begin_window(self) -> None:
        """Record the schedule at the start of a window."""
        self.schedule.begin(self.optimizer.param_groups)

    def check_window(self) -> None:
        """Refuse a schedule that has moved since the open window began; see `ScheduleGuard.check`."""
        self.schedule.check(self.optimizer)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The parameter groups of the user's optimizer; learning rates are read and set in these groups."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The state of the user's optimizer, by parameter."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The defaults of a new parameter group."""
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the user's optimizer; its parameters must belong to a prepared model."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the user's optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict into the user's optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def check_copyable(self) -> None:
        """Refuse to copy an optimizer over sharded parameters, because the copy would be useless.

        Raises:
            TypeError: The parameters are sharded.
        """
        if any(hasattr(p, "full_tensor") for group in self.param_groups for p in group["params"]):
            raise TypeError(uncopyable(self.optimizer))

    def __reduce_ex__(self, protocol: Any) -> Any:
        del protocol
        self.check_copyable()
        return itself, (self.optimizer,)

    def __copy__(self) -> Any:
        self.check_copyable()
        return copy(self.optimizer)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not yet set
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"PreparedOptimizer({self.optimizer!r})"


def itself(value: Any) -> Any:
    """Return the argument. A pickle of a wrapper holds the user's object and a call of this function."""
    return value


def uncopyable(optimizer: Optimizer) -> str:
    """Return the error message for copying an optimizer whose parameters are divided among ranks."""
    return (
        f"{type(optimizer).__name__} cannot be copied or pickled: its parameters and state are divided among "
        "ranks, and a copy would belong to no model. save_state() keeps them; for a second model build it anew, with "
        "its own optimizer, and prepare() both"
    )
