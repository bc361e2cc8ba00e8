"""Clip the gradients of a closed window."""

from collections.abc import Iterable

from torch import Tensor

from drivetrain.parts.parts import HasParts


class GradientLimits(HasParts):
    """The part of an Accelerator that limits gradients before a step."""

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """Clip the gradients' global norm once the window is closed. Called on all ranks.

        Returns:
            The norm before clipping, shape (); None while the window is open.
        """
        chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        return self._parts.prepared.holding(chosen).clip(chosen, norm=max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clip each gradient element to [-clip_value, clip_value] once the window is closed. Called on all ranks."""
        chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self._parts.prepared.holding(chosen).clip(chosen, value=clip_value)
