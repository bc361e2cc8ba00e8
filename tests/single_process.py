"""What the tests of one process train: a backend on the CPU, and a small model."""

import torch
from torch import nn

from drivetrain_backends import AccumulationWindow, SingleBackend
from drivetrain_precision import PrecisionSettings, choose_policy
from drivetrain_state import StateSettings, connect


def backend(
    mode: str = "no", accumulation: int = 1, settings: PrecisionSettings | None = None
) -> SingleBackend:
    """The backend of one process."""
    context = connect(StateSettings(device="cpu"))
    policy = choose_policy(mode, context.device, settings)
    return SingleBackend(context, policy, window=AccumulationWindow(accumulation))


def linear() -> nn.Linear:
    """A layer of two features and one output, always with the same weights."""
    torch.manual_seed(0)
    return nn.Linear(2, 1)
