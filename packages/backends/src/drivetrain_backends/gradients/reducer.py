"""The interface that runs a backward and reduces its gradients over ranks, and its form for gradients in `.grad`."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn

from drivetrain_backends.gradients.backward_options import ONCE, BackwardOptions
from drivetrain_backends.gradients.multi_tensor import multiply, stored_values
from drivetrain_precision import LossScaler


class GradientReducer(Protocol):
    """An object that runs backwards, averages their gradients over ranks, and makes them final.

    Attributes:
        scaler: The loss scale, for fp16.
        is_joined: Whether ranks may run out of batches at different steps.
    """

    scaler: LossScaler | None
    is_joined: bool

    def backward(self, loss: Tensor, models: Sequence[nn.Module], *, options: BackwardOptions = ONCE) -> None:
        """Run the backward of a loss, of shape (), already divided for its window. Called on all ranks.

        Args:
            loss: The loss to differentiate.
            models: The users' modules that the caller says the loss trains.
            options: The arguments of torch's `backward`.

        Raises:
            AccumulationError: The options cannot be honoured.
        """
        ...

    def leaves(self, models: Sequence[nn.Module]) -> list[Tensor]:
        """Return the leaves of a loss's graph for these models: their parameters or replacements of them."""
        ...

    def finalize(self, models: Sequence[nn.Module], factor: Tensor | float | None) -> bool:
        """Unscale the reduced gradients of a closed window, and multiply them by `factor`. Called on all ranks.

        Returns:
            Whether a gradient holds an infinity or NaN, as far as this is checked (fp16).
        """
        ...


class ParameterGradients:
    """The gradients that torch's autograd leaves in `.grad`, in full on every rank, where other code may change them.

    Attributes:
        scaler: The loss scale, for fp16.
        is_joined: Whether ranks may run out of batches at different steps.
        averages: Whether ranks hold replicas, so that gradients changed by other code must be averaged.
    """

    averages = False

    def __init__(self, scaler: LossScaler | None) -> None:
        self.scaler = scaler
        self.is_joined = False

    def backward(self, loss: Tensor, models: Sequence[nn.Module], *, options: BackwardOptions = ONCE) -> None:
        """Run torch's backward, on the scaled loss for fp16; see `GradientReducer.backward`."""
        del models
        options.run(loss if self.scaler is None else self.scaler.scale(loss))

    def leaves(self, models: Sequence[nn.Module]) -> list[Tensor]:
        """Return the parameters; see `GradientReducer.leaves`."""
        return [parameter for model in models for parameter in model.parameters()]

    def finalize(self, models: Sequence[nn.Module], factor: Tensor | float | None) -> bool:
        """Unscale and correct in one pass; see `GradientReducer.finalize`."""
        if factor is None and self.scaler is None:
            return False
        gradients = [stored_values(p.grad) for p in trainable_parameters(models) if p.grad is not None]
        if self.scaler is not None:
            found = bool(self.scaler.unscale(gradients, factor=1.0 if factor is None else factor).item())
            self.scaler.observe(overflowed=found)
            return found
        if factor is not None:
            multiply(gradients, factor)
        return False

    def have_moved(self, models: Sequence[nn.Module]) -> bool:
        """Return whether gradients moved to other tensors since the last call, with the same values."""
        del models
        return False

    def mark_edited(self, models: Sequence[nn.Module]) -> None:
        """Record that other code changed the gradients of models, which ranks then average in `finalize`."""
        del models

    def are_averaged(self, models: Sequence[nn.Module]) -> bool:
        """Return whether all gradients of models are averaged, so that `finalize` has nothing to average."""
        del models
        return True

    def average(self, models: Sequence[nn.Module]) -> None:
        """Average the gradients of models over ranks, if `averages`. Called on all ranks."""
        del models


def trainable_parameters(models: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of models that require a gradient, each once."""
    return list({p: None for model in models for p in model.parameters() if p.requires_grad})
