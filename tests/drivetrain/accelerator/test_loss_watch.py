from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from plain_loop.accelerated import accelerator_of


def train(num_steps: int, bad: int, *, treatment: str = "warn") -> None:
    """Train on a loss that is NaN from some step on."""
    sections: dict[str, Any] = {"run": {"on_nonfinite": treatment, "show_plan": False}}
    with accelerator_of("single", sections=sections) as accelerator:
        model = nn.Linear(2, 1)
        model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
        for step in range(1, num_steps + 1):
            accelerator.backward(model(torch.ones(1, 2)).mean() * (float("nan") if step >= bad else 1.0))
            optimizer.step()
            optimizer.zero_grad()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.message for one in caplog.records if one.message.startswith("the loss of step")]


@pytest.mark.parametrize(("num_steps", "bad", "told"), [(40, 3, 16), (40, 20, 32), (5, 5, 5), (33, 33, 33)])
def test_a_loss_that_is_not_finite_is_told_once(
    num_steps: int, bad: int, told: int, caplog: pytest.LogCaptureFixture
) -> None:
    train(num_steps, bad)
    (message,) = said(caplog)
    assert message.startswith(f"the loss of step {told} is nan, and training goes on")
    assert (
        "An infinity or NaN is in all 2 parameters already. Go on from a checkpoint with 'raise'" in message
    )


@pytest.mark.parametrize(("bad", "treatment"), [(100, "warn"), (3, "skip")])
def test_nothing_is_said_of_finite_losses_and_of_steps_that_are_skipped(
    bad: int, treatment: str, caplog: pytest.LogCaptureFixture
) -> None:
    train(40, bad, treatment=treatment)
    assert not said(caplog)
