"""The reduced gradients of DeepSpeed's optimizers: where they are kept, and how they are corrected and clipped."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain_backends.gradients.multi_tensor import multiply_by_device
from drivetrain_deepspeed import compat

_CLIP_EPSILON = 1e-6  # torch's and DeepSpeed's own, added to the norm


class ReducedGradients:
    """The gradients of one engine, between the reduction that closes a window and the engine's step.

    This class is for stage 1 in bf16, whose gradients are flat fp32 buffers beside the bf16 parameters. It is also
    the base of the classes for the other stages.
    """

    def __init__(self, engine: Any) -> None:
        # Whether the backward that closes a window makes the gradients ready for the step, so that no other backward
        # may follow.
        self.in_backward = False
        self._engine = engine
        self._optimizer = engine.optimizer
        self._configured_norm: float = engine.gradient_clipping()
        self._bound = math.inf  # the smallest of the requested norms: an engine clips once, at its step
        self._left: Tensor | None = None  # the norm after the clips so far

    def scale_losses(self, scale: float) -> None:
        """Multiply losses by `scale` from now on, and divide gradients by it at the step; 1 outside fp16."""
        assert scale == 1.0

    def correct(self, factor: float) -> None:
        """Multiply the gradients by `factor`, now or at the latest in the step."""
        multiply_by_device(compat.flat_gradients(self._optimizer), factor)

    def norm(self) -> Tensor:
        """Return the global 2-norm, shape (); infinite or NaN if a gradient is not finite. Called on all ranks."""
        norm = compat.global_norm(self._optimizer)
        return torch.where(norm < 0, torch.full_like(norm, math.nan), norm)

    def clip(self, max_norm: float) -> Tensor:
        """Clip the global norm, now or at the step; return the norm before clipping, shape (). Called on all ranks.

        A second clip in a window starts from the norm that the first clip left.
        """
        norm = self.norm() if self._left is None else self._left
        self._left = norm * (max_norm / (norm + _CLIP_EPSILON)).clamp(max=1.0)
        self._bound = min(self._bound, max_norm)
        compat.clip_at_step(self._optimizer, self._bound)
        return norm

    def used(self) -> None:
        """Forget this window's correction and clipping."""
        self._bound, self._left = math.inf, None
        compat.clip_at_step(self._optimizer, self._configured_norm)

    def discard(self) -> None:
        """Drop the gradients without a step."""
        compat.drop_gradients(self._engine)
        self.used()


class FullGradients(ReducedGradients):
    """The gradients of stage 0: `.grad` of the parameters, in full on every rank, clipped in place."""

    def correct(self, factor: float) -> None:
        """Multiply the gradients in place; see `ReducedGradients.correct`."""
        multiply_by_device(self._gradients(), factor)

    def norm(self) -> Tensor:
        """Return the norm; see `ReducedGradients.norm`."""
        return nn.utils.get_total_norm(self._gradients())

    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradients in place; see `ReducedGradients.clip`."""
        return nn.utils.clip_grad_norm_(self._engine.module.parameters(), max_norm)

    def used(self) -> None:
        """Do nothing, because nothing is recorded; see `ReducedGradients.used`."""

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._engine.module.parameters() if p.grad is not None]


class PartitionedGradients(ReducedGradients):
    """The gradients of ZeRO stages 1 to 3: each rank's partition, which the step divides by the loss scale.

    A correction is folded into that division, so that it needs no pass over the gradients.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        # Offloaded gradients are copied during backward; reduced afterwards, each would be copied twice more.
        self.in_backward = compat.offloads_gradients(engine)
        # Offloading optimizers need the norm for more than clipping.
        self._measures_again = compat.can_skip_norm(self._optimizer) and not self.in_backward
        self._scale = 1.0
        self._divide_by(1.0)

    def scale_losses(self, scale: float) -> None:
        """Set the scale of the optimizer; see `ReducedGradients.scale_losses`."""
        self._scale = scale
        self._divide_by(scale)

    def correct(self, factor: float) -> None:
        """Fold the factor into the step's division; see `ReducedGradients.correct`."""
        self._divide_by(self._scale / factor if factor else math.inf)

    def norm(self) -> Tensor:
        """Return the norm after the division; see `ReducedGradients.norm`."""
        return super().norm() / self._divisor

    def clip(self, max_norm: float) -> Tensor:
        """Measure the norm now and let the step clip; see `ReducedGradients.clip`."""
        norm = super().clip(max_norm)
        if self._measures_again and norm.isfinite().item():
            # Clipped by the division too, so that the step need not measure the norm again.
            self._divide_by(self._divisor * max(1.0, (norm.item() + _CLIP_EPSILON) / max_norm))
            compat.clip_at_step(self._optimizer, 0.0)
            compat.measure_at_step(self._optimizer, False)
        return norm

    def used(self) -> None:
        """Restore clipping and scale; see `ReducedGradients.used`."""
        super().used()
        self._divide_by(self._scale)
        if self._measures_again:
            compat.measure_at_step(self._optimizer, True)

    def _divide_by(self, divisor: float) -> None:
        self._divisor = divisor
        compat.divide_at_step(self._optimizer, divisor)


def gradients_of(engine: Any) -> ReducedGradients:
    """Return the gradients of an engine, by the kind of its optimizer."""
    if not engine.zero_optimization():
        return FullGradients(engine)
    return ReducedGradients(engine) if compat.adds_up_flat(engine.optimizer) else PartitionedGradients(engine)
