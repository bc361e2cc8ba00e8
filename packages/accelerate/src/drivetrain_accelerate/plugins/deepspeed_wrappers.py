"""The engine, optimizer and schedule of DeepSpeed in the form of a plain training loop."""

from typing import Any

from torch import Tensor


class DeepSpeedEngineWrapper:
    """An engine that steps in backward, when gradients are to be reduced.

    Args:
        engine: The engine of DeepSpeed.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def backward(self, loss: Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Run backward, and the optimizer's step if a window of micro-batches ends. Called on all ranks."""
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        if sync_gradients:
            self.engine.step()

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of all gradients at the last step; None before the first."""
        norm = self.engine.get_global_grad_norm()
        return norm.item() if isinstance(norm, Tensor) else norm


class DeepSpeedOptimizerWrapper:
    """An optimizer whose steps the engine takes.

    Args:
        optimizer: The optimizer of DeepSpeed.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:
        """The state by parameter."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> Any:
        """The groups of parameters."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: Any) -> None:
        self.optimizer.param_groups = param_groups

    @property
    def defaults(self) -> Any:
        """The options of groups that say none."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: Any) -> None:
        self.optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Change an optimizer that has modes to training."""
        if callable(change := getattr(self.optimizer, "train", None)):
            change()

    def eval(self) -> None:
        """Change an optimizer that has modes to evaluation."""
        if callable(change := getattr(self.optimizer, "eval", None)):
            change()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: the engine does so in its step."""

    def step(self) -> None:
        """Do nothing: `DeepSpeedEngineWrapper.backward` has stepped."""

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was left out, as gradients overflowed."""
        return bool(getattr(self.optimizer, "overflow", False))


class DeepSpeedSchedulerWrapper:
    """A schedule that the engine steps.

    Args:
        scheduler: The schedule of learning rates.
        optimizers: The optimizer of the schedule, or several.
    """

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        self.scheduler = scheduler
        self.optimizers = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]

    def step(self) -> None:
        """Do nothing: the engine steps the schedule."""

    def get_last_lr(self) -> list[float]:
        """Return the learning rates of the groups."""
        return self.scheduler.get_last_lr()

    def get_lr(self) -> list[float]:
        """Return the learning rates as the schedule computes them."""
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> None:
        """Let the schedule print its rates."""
        self.scheduler.print_lr(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state."""
        self.scheduler.load_state_dict(state_dict)
