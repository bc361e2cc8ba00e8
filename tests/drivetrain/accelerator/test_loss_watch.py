from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from drivetrain import Accelerator
from drivetrain_state import ParallelDims
from logged_messages import messages_of
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


@pytest.mark.parametrize(("num_steps", "bad", "told"), [(40, 3, 3), (40, 20, 20), (5, 5, 5), (33, 33, 33)])
def test_a_loss_that_is_not_finite_is_told_once(
    num_steps: int, bad: int, told: int, caplog: pytest.LogCaptureFixture
) -> None:
    train(num_steps, bad)
    (message,) = said(caplog)
    assert message.startswith(f"the loss of step {told} is nan, and training goes on")
    assert (
        "An infinity or NaN is in all 2 parameters already. Go on from a checkpoint with 'raise'" in message
    )


def test_the_first_loss_that_is_not_finite_is_told_of_all_models_and_micro_batches(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with accelerator_of("single", sections={"run": {"show_plan": False}}) as accelerator:
        models, optimizers = [], []
        for _ in range(2):
            model = nn.Linear(2, 1)
            model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
            models.append(model)
            optimizers.append(optimizer)
        for step in range(300):  # of the first model alone from the second on
            for place in (0, 1) if step == 0 else (0,):
                loss = models[place](torch.ones(1, 2)).mean() * (
                    torch.inf if (step, place) == (0, 0) else 1.0
                )
                accelerator.backward(loss, model=models[place])
                if step < 40:
                    optimizers[place].step()
                    optimizers[place].zero_grad()
    (message,) = said(caplog)
    assert message.split(",")[0] in ("the loss of step 1 is inf", "the loss of step 1 is -inf")


@pytest.mark.ranks(2)
def test_a_loss_of_a_model_in_stages_is_told() -> None:
    class Stages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).mean() * torch.nan

    with messages_of("drivetrain.accelerator.loss_watch") as told:
        accelerator = Accelerator(
            cpu=True, parallelism=ParallelDims(pipeline=2), sections={"run": {"show_plan": False}}
        )
        model = Stages()
        model, _ = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            accelerator.train_step(torch.ones(2, 2), loss=loss, model=model)
        is_main = accelerator.is_main_process
        accelerator.end_training()
    assert len(told) == is_main
    assert not is_main or told[0].startswith("the loss of step 1 is nan")


@pytest.mark.parametrize(("bad", "treatment"), [(100, "warn"), (3, "skip")])
def test_nothing_is_said_of_finite_losses_and_of_steps_that_are_skipped(
    bad: int, treatment: str, caplog: pytest.LogCaptureFixture
) -> None:
    train(40, bad, treatment=treatment)
    assert not said(caplog)
