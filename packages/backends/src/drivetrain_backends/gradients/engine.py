"""Who runs a backward, and where its gradients lie until a step uses them."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from drivetrain_precision import LossScaler


class GradientCarrier(Protocol):
    """Runs backwards, and makes what they left final."""

    def run(self, loss: Tensor, models: Sequence[nn.Module]) -> None:
        """Run the backward of a loss, of shape (), already divided as its window wants it. Called on all ranks.

        Args:
            loss: What to differentiate.
            models: The users' modules that it is said to train.
        """
        ...

    def leaves(self, models: Sequence[nn.Module]) -> list[Tensor]:
        """What the graph of a loss of these models ends in: their parameters, or what stands for them."""
        ...

    def settle(self, models: Sequence[nn.Module], factor: Tensor | float | None) -> bool:
        """Unscale the reduced gradients of a closed window, and multiply them by `factor`. Called on all ranks.

        Returns:
            Whether one holds an infinity or NaN, as far as that is looked for (fp16).
        """
        ...


class ParameterGradients:
    """The gradients that torch's autograd leaves in `.grad`, whole on every rank.

    Args:
        scaler: The loss scale, for fp16.

    Attributes:
        averages: Whether ranks hold the same model, and must average what others put into gradients.
    """

    averages = False

    def __init__(self, scaler: LossScaler | None) -> None:
        self._scaler = scaler

    def have_moved(self, models: Sequence[nn.Module]) -> bool:
        """Tell, once, that gradients of models were put elsewhere with the same values."""
        del models
        return False

    def note_foreign(self, models: Sequence[nn.Module]) -> None:
        """Note that others changed the gradients of models."""
        del models

    def is_averaged(self, models: Sequence[nn.Module]) -> bool:
        """Tell whether `settle` has nothing to average: backwards of models left gradients that ranks share."""
        del models
        return True

    def average(self, models: Sequence[nn.Module]) -> None:
        """Average the gradients of models over ranks, where `averages`. Called on all ranks."""
        del models

    def run(self, loss: Tensor, models: Sequence[nn.Module]) -> None:
        """Run torch's backward, of the scaled loss for fp16; see `GradientCarrier.run`."""
        del models
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def leaves(self, models: Sequence[nn.Module]) -> list[Tensor]:
        """The parameters; see `GradientCarrier.leaves`."""
        return [parameter for model in models for parameter in model.parameters()]

    def settle(self, models: Sequence[nn.Module], factor: Tensor | float | None) -> bool:
        """Unscale and correct in one pass; see `GradientCarrier.settle`."""
        if factor is None and self._scaler is None:
            return False
        gradients = [_values(p.grad) for p in trainable_parameters(models) if p.grad is not None]
        if self._scaler is not None:
            return bool(self._scaler.unscale(gradients, factor=1.0 if factor is None else factor).item())
        if gradients and factor is not None:
            torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateUsage] as torch's optimizers do
        return False


def trainable_parameters(models: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The parameters of models that want a gradient, each once."""
    return list({p: None for model in models for p in model.parameters() if p.requires_grad})


def _values(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.is_sparse else gradient
