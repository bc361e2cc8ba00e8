"""The place of a run in its data, saved with an optimizer's state, for programs that count batches by themselves.

transformers' Trainer, for one, saves the optimizer's state and its own number of steps, and skips batches when it
resumes. Where a batch has become larger or smaller, these are other samples than those that were read.
"""

from collections.abc import Mapping
from typing import Any

from drivetrain_accelerate.states.gradient_state import GradientState

_KEY = "data_position"


def with_position(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict of an optimizer with the place of the innermost loop, if a loader is being read."""
    position = GradientState().data_position
    return state if position is None else {**state, _KEY: position}


def take_position(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict of an optimizer without the place of its loop, which resuming is compared with."""
    GradientState().resumed_from = state.get(_KEY)
    return {name: value for name, value in state.items() if name != _KEY}
