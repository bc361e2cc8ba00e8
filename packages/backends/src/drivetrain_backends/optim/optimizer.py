"""An optimizer as the training loop sees it: stepping goes through the backend, all else to the real one."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from drivetrain_backends.errors import AccumulationError
from drivetrain_backends.optim.schedule_guard import ScheduleGuard


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What became of a call to `step`.

    Attributes:
        stepped: The optimizer moved the parameters.
        skipped: The window was closed, and the step left out because a gradient was not finite: in fp16, or where the
            run says so.
        grad_norm: The global gradient norm before clipping, shape (), where one was computed for this step.
    """

    stepped: bool
    skipped: bool
    grad_norm: Tensor | None = None


class Stepper(Protocol):
    """The part of `Prepared` that an optimizer is stepped through."""

    def step(self, optimizer: Optimizer) -> StepResult:
        """Step one of the model's optimizers."""
        ...

    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        """Clear the gradients of one optimizer."""
        ...


class _Released:
    """What an optimizer is stepped through once its backend was closed: nothing."""

    def step(self, optimizer: Optimizer) -> StepResult:
        """Refuse to step.

        Raises:
            AccumulationError: Raised by every call.
        """
        raise AccumulationError(
            f"step() of {type(optimizer).__name__} after free_memory() or end_training(): the backend of its "
            "model is closed; prepare() model and optimizer again, or step the optimizer that you built"
        )

    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        """Clear the gradients, which no window holds any more."""
        optimizer.zero_grad(set_to_none)


class PreparedOptimizer(Optimizer):
    """Stands in for the user's optimizer: the same groups and state, `step` and `zero_grad` in step with the window.

    Args:
        optimizer: The user's optimizer, over the prepared parameters.
        prepared: The model it trains.

    A copy (`copy.copy`, `copy.deepcopy`) or pickle of it is one of the user's optimizer, which no window holds: a
    snapshot, or an optimizer to be prepared by itself.

    Attributes:
        optimizer: The user's optimizer.
        num_steps: How often it moved the parameters; skipped steps and open windows do not count.
        last_result: What became of the last call to `step`; None before the first.
        before_step: Called before a step, until it says that it need not be called again.
        schedule: Refuses schedules of it that advance inside a window.
        on_step: Called when a window ends with it, be it that the parameters moved or that the step was skipped.
    """

    def __init__(self, optimizer: Optimizer, prepared: Stepper) -> None:
        # Not calling Optimizer.__init__: groups, state and defaults stay where they are, in the user's optimizer.
        self.optimizer = optimizer
        self.prepared: Stepper = prepared
        self.num_steps = 0
        self.last_result: StepResult | None = None
        self.before_step: Callable[[], bool] | None = None
        self.on_step: Callable[[], None] | None = None
        self.schedule = ScheduleGuard(self, optimizer)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step if the accumulation window is closed. Called on all ranks.

        Raises:
            ValueError: A closure is given: it would run backward behind the backend's back.
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
        if self.on_step is not None:
            self.on_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; those that an open window has gathered stay."""
        self.prepared.zero_grad(self.optimizer, set_to_none=set_to_none)

    @property
    def was_skipped(self) -> bool:
        """Whether the last call to `step` was left out because a gradient was not finite."""
        return self.last_result is not None and self.last_result.skipped

    def release(self) -> None:
        """Let go of the model: from now on `step` is refused. For a backend that is closed."""
        self.prepared = _Released()
        self.before_step = self.on_step = None

    @property
    def is_untouched(self) -> bool:
        """Whether neither a window of several micro-batches has begun nor `step` was ever called."""
        return not self.schedule.has_begun and self.last_result is None and self.num_steps == 0

    def begin_window(self) -> None:
        """Take up the schedule that a window begins with."""
        self.schedule.begin(self.optimizer.param_groups)

    def check_window(self) -> None:
        """Refuse a schedule that has moved since the open window began; see `ScheduleGuard.check`."""
        self.schedule.check(self.optimizer)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The user's parameter groups; learning rates are read and set here."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The state by parameter, as the user's optimizer keeps it."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The values a new parameter group starts from."""
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the user's optimizer; its parameters must belong to a prepared model."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The user's optimizer's own state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the user's optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def check_copyable(self) -> None:
        """Refuse to copy what would be of no use: an optimizer over parts of parameters.

        Raises:
            TypeError: It is one.
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
    """Return what is given: pickles of a stand-in hold the user's object, and call this."""
    return value


def uncopyable(optimizer: Optimizer) -> str:
    """Return why an optimizer whose parameters are divided among ranks is not copied, for an error."""
    return (
        f"{type(optimizer).__name__} cannot be copied or pickled: its parameters and state are divided among "
        "ranks, and a copy would belong to no model. save_state() keeps them; for a second model build it anew, with "
        "its own optimizer, and prepare() both"
    )
