"""What the tests of one process train: a backend on the CPU, and a small model."""

import torch
from torch import nn

from drivetrain_backends import AccumulationWindow, SingleBackend
from drivetrain_backends.gradients.accumulation import NonFiniteGradients
from drivetrain_precision import PrecisionSettings, choose_policy
from drivetrain_state import StateSettings, connect


def backend(
    mode: str = "no",
    accumulation: int = 1,
    settings: PrecisionSettings | None = None,
    nonfinite_gradients: NonFiniteGradients = "ignore",
) -> SingleBackend:
    """The backend of one process."""
    context = connect(StateSettings(device="cpu"))
    policy = choose_policy(mode, context.device, settings)
    window = AccumulationWindow(accumulation, nonfinite_gradients=nonfinite_gradients)
    return SingleBackend(context, policy, window=window)


def linear() -> nn.Linear:
    """A layer of two features and one output, always with the same weights."""
    torch.manual_seed(0)
    return nn.Linear(2, 1)


class Weight(nn.Module):
    """One weight w; maps x to w * x, so that the gradient of a loss is known by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * x
