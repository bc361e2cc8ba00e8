"""What the peer does on a card, beside which drivetrain's answer stands in the table of differences."""

import pytest
import torch
from torch import nn


@pytest.mark.only_on("cuda", why="Accelerate scales no loss on the CPU, and knows no simulated device")
def test_accelerate_unscales_gradients_of_fp16() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(mixed_precision="fp16")
    given = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(given, torch.optim.SGD(given.parameters(), lr=1.0))
    accelerator.backward(model(torch.ones(1, 1, device="cuda")).mean())
    assert given.weight.grad is not None
    scaled = given.weight.grad.item()
    accelerator.unscale_gradients(optimizer)
    assert given.weight.grad.item() < scaled
    accelerator.end_training()
    type(accelerator.state)._reset_state(reset_partial_state=True)  # the class keeps it for the process
