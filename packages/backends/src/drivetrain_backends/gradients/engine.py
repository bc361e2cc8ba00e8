"""The interface that runs a backward, and where its gradients stay until a step uses them."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn

from drivetrain_backends.gradients.multi_tensor import multiply, stored_values
from drivetrain_precision import LossScaler


class GradientCarrier(Protocol):
    """An object that runs backwards and finalises their gradients."""

    def run(self, loss: Tensor, models: Sequence[nn.Module]) -> None:
        """Run the backward of a loss, of shape (), already divided for its window. Called on all ranks.

        Args:
            loss: The loss to differentiate.
            models: The users' modules that the caller says the loss trains.
        """
        ...

    def leaves(self, models: Sequence[nn.Module]) -> list[Tensor]:
        """Return the leaves of a loss's graph for these models: their parameters or replacements of them."""
        ...

    def settle(self, models: Sequence[nn.Module], factor: Tensor | float | None) -> bool:
        """Unscale the reduced gradients of a closed window, and multiply them by `factor`. Called on all ranks.

        Returns:
            Whether a gradient holds an infinity or NaN, as far as this is checked (fp16).
        """
        ...


class ParameterGradients:
    """The gradients that torch's autograd leaves in `.grad`, in full on every rank.

    Args:
        scaler: The loss scale, for fp16.

    Attributes:
        averages: Whether ranks hold replicas, so that gradients changed by other code must be averaged.
    """

    averages = False

    def __init__(self, scaler: LossScaler | None) -> None:
        self._scaler = scaler

    def have_moved(self, models: Sequence[nn.Module]) -> bool:
        """Return whether gradients moved to other tensors since the last call, with the same values."""
        del models
        return False

    def note_foreign(self, models: Sequence[nn.Module]) -> None:
        """Record that other code changed the gradients of models."""
        del models

    def is_averaged(self, models: Sequence[nn.Module]) -> bool:
        """Return whether all gradients of models are averaged, so that `settle` has nothing to average."""
        del models
        return True

    def average(self, models: Sequence[nn.Module]) -> None:
        """Average the gradients of models over ranks, if `averages`. Called on all ranks."""
        del models

    def run(self, loss: Tensor, models: Sequence[nn.Module]) -> None:
        """Run torch's backward, on the scaled loss for fp16; see `GradientCarrier.run`."""
        del models
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def leaves(self, models: Sequence[nn.Module]) -> list[Tensor]:
        """Return the parameters; see `GradientCarrier.leaves`."""
        return [parameter for model in models for parameter in model.parameters()]

    def settle(self, models: Sequence[nn.Module], factor: Tensor | float | None) -> bool:
        """Unscale and correct in one pass; see `GradientCarrier.settle`."""
        if factor is None and self._scaler is None:
            return False
        gradients = [stored_values(p.grad) for p in trainable_parameters(models) if p.grad is not None]
        if self._scaler is not None:
            return bool(self._scaler.unscale(gradients, factor=1.0 if factor is None else factor).item())
        if factor is not None:
            multiply(gradients, factor)
        return False


def trainable_parameters(models: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of models that require a gradient, each once."""
    return list({p: None for model in models for p in model.parameters() if p.requires_grad})
