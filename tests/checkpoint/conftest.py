"""What the checkpoint tests share."""

import pytest
import torch

from drivetrain_state import Context, Topology


@pytest.fixture
def context() -> Context:
    """One process, alone."""
    return Context(topology=Topology(), device=torch.device("cpu"))
