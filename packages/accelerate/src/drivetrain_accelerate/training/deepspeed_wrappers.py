"""The engine, optimizer and schedule of DeepSpeed in the form of a plain training loop."""

from typing import Any

from torch import Tensor

from drivetrain_accelerate.training.stepped_optimizer import AcceleratedOptimizer
from drivetrain_accelerate.training.stepped_scheduler import AcceleratedScheduler


class DeepSpeedEngineWrapper:
    """An engine that steps in backward, when gradients are to be reduced."""

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


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """An optimizer whose steps the engine takes."""

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: the engine does so in its step."""

    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] as in Accelerate
        """Do nothing: `DeepSpeedEngineWrapper.backward` has stepped."""

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was left out, as gradients overflowed."""
        return bool(getattr(self.optimizer, "overflow", False))


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """A schedule that the optimizer's step advances, so that a program's own call has nothing left to do."""

    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] as in Accelerate
        """Do nothing: the schedule has advanced with its optimizer."""
