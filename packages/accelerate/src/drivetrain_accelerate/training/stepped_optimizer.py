"""The prepared form of an optimizer: it steps when the window of micro-batches closes."""

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch.optim import Optimizer

from drivetrain_accelerate.plain_values import shown
from drivetrain_accelerate.states.gradient_state import GradientState
from drivetrain_accelerate.states.partial_state import PartialState
from drivetrain_accelerate.tensors.nested_tensors import recursively_apply
from drivetrain_backends import PreparedOptimizer

_POSITION = "data_position"  # the entry of an optimizer's saved state


class AcceleratedOptimizer(Optimizer):
    """The user's optimizer, with its groups and state, stepped by drivetrain.

    A deep copy or pickle holds a copy of the user's optimizer. The copy may be prepared with a model of its own.
    """

    def __init__(self, optimizer: Optimizer, device_placement: bool = True, scaler: Any = None) -> None:
        # Optimizer.__init__ is not called: groups, state and defaults stay in the user's optimizer.
        self._prepared = optimizer
        self.optimizer = optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer
        self.scaler = scaler
        self.device_placement = device_placement
        self.gradient_state = GradientState()
        self.schedules: list[Any] = []  # each step advances them

    def release(self) -> None:
        """Remove this optimizer from the run that prepared it."""
        if isinstance(self._prepared, PreparedOptimizer):
            self._prepared.release()

    @property
    def is_released(self) -> bool:
        """True if the run has released this optimizer, so that it may be prepared again."""
        return isinstance(self._prepared, PreparedOptimizer) and self._prepared.is_released

    state = shown("optimizer.state", "The state by parameter.", is_settable=True)
    param_groups = shown("optimizer.param_groups", "The groups, with their learning rates.", is_settable=True)
    defaults = shown("optimizer.defaults", "The defaults of a new group.", is_settable=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the user's optimizer."""
        self._prepared.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the user's optimizer, with the position of the current loop in its data."""
        return add_position(self._prepared.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict into the user's optimizer."""
        self._prepared.load_state_dict(take_position(state_dict))

    def zero_grad(self, set_to_none: bool | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Clear the gradients, unless the window is open."""
        if self.gradient_state.sync_gradients:
            self._prepared.zero_grad(set_to_none=set_to_none is None or set_to_none)

    def drop_gradients(self) -> None:
        """Clear the gradients of a window in which a micro-batch has failed."""
        self._prepared.zero_grad()

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step if the window is closed; on several ranks, refuse if no model is prepared. Called on all ranks."""
        if not self.gradient_state.sync_gradients:
            return
        if self.is_waiting and PartialState().num_processes > 1:
            raise RuntimeError(
                f"{type(self.optimizer).__name__}.step(): no prepared model has its parameters, so that nothing "
                "averages their gradients over processes: prepare() the model"
            )
        self._prepared.step(closure)
        if not self.step_was_skipped:
            for schedule in self.schedules:
                schedule.step()

    @property
    def is_waiting(self) -> bool:
        """True until a model with this optimizer's parameters is prepared."""
        return not isinstance(self._prepared, PreparedOptimizer)

    def pair(self, prepared: Optimizer) -> None:
        """Step through drivetrain's prepared form of the user's optimizer from now on."""
        self._prepared = prepared

    def train(self) -> None:
        """Switch an optimizer that has modes, such as a schedule-free one, to training."""
        if callable(switch := getattr(self.optimizer, "train", None)):
            switch()

    def eval(self) -> None:
        """Switch an optimizer that has modes, such as a schedule-free one, to evaluation."""
        if callable(switch := getattr(self.optimizer, "eval", None)):
            switch()

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was skipped because a gradient was not finite."""
        return isinstance(self._prepared, PreparedOptimizer) and self._prepared.was_skipped

    def __copy__(self) -> Self:
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A deep copy or pickle has parameters of its own, which no run trains: it waits for their model.
        return type(self)._copied, (self.optimizer, self.device_placement)

    @classmethod
    def _copied(cls, optimizer: Optimizer, device_placement: bool) -> Self:
        copied = cls.__new__(cls)
        AcceleratedOptimizer.__init__(copied, optimizer, device_placement)
        return copied

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "_prepared"):  # not yet set
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"


def move_to_device(state: Any, device: torch.device) -> Any:
    """Return the state of an optimizer with all of its tensors on a device."""
    return recursively_apply(torch.Tensor.to, state, device)


# Programs such as transformers' Trainer save the optimizer's state and their own number of steps, and skip batches
# when they resume. Where a batch has become larger or smaller, these are other samples than those that were read.
def add_position(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict; if a loader is being read, add the position of the innermost loop."""
    position = GradientState().data_position
    return state if position is None else {**state, _POSITION: position}


def take_position(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict without the position of its loop; store the position for later checks."""
    GradientState().resumed_from = state.get(_POSITION)
    return {name: value for name, value in state.items() if name != _POSITION}
