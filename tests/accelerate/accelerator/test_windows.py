"""When windows of accumulation close, and how many micro-batches may be said; beside the real Accelerate."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate_sides import OURS, THEIRS, Side
from drivetrain_accelerate.accelerator.accelerator import Accelerator
from drivetrain_config import environ

pytest.importorskip("accelerate")


def two_epochs(side: Side, **options: Any) -> tuple[str, list[float], list[float]]:
    """Return which of 16 micro-batches close a window, the learning rates, and the weights."""
    torch.manual_seed(0)
    plugin = side("accelerate.utils.GradientAccumulationPlugin")(**options)
    with side.accelerator(gradient_accumulation_plugin=plugin) as accelerator:
        model = torch.nn.Linear(1, 1)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        loader: Any = DataLoader(TensorDataset(torch.arange(24.0).reshape(24, 1) / 24), batch_size=3)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        closes, rates = "", list[float]()
        for _ in range(2):
            for (batch,) in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).square().mean())
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                    closes += "-S"[accelerator.sync_gradients]
                    rates += schedule.get_last_lr()
        return closes, rates, [each.item() for each in model.parameters()]


def test_a_window_goes_on_over_a_loaders_end_if_that_does_not_close_it() -> None:
    theirs, ours = (two_epochs(side, num_steps=3, sync_with_dataloader=False) for side in (THEIRS, OURS))
    assert ours[:2] == theirs[:2]
    assert ours[0] == "--S--S--S--S--S-"
    assert ours[2] == pytest.approx(theirs[2])


@pytest.mark.parametrize("given", [0, -1, 1.5, None, "two"])
def test_a_number_of_micro_batches_that_cannot_be_is_refused_where_it_is_said(given: Any) -> None:
    with OURS.accelerator() as accelerator:
        with pytest.raises(ValueError, match=f"gradient_accumulation_steps={given!r}: must be an integer of"):
            accelerator.gradient_accumulation_steps = given
        with pytest.raises(ValueError, match=f"gradient_accumulation_steps={given!r}: must be an integer of"):
            Accelerator(gradient_accumulation_steps=given)
        if given is not None:  # a plugin does not need to say it
            plugin = OURS("accelerate.utils.GradientAccumulationPlugin")(num_steps=given)
            with pytest.raises(ValueError, match=r"GradientAccumulationPlugin\(num_steps=.*\): must be an"):
                Accelerator(gradient_accumulation_plugin=plugin)
        with (
            environ.exported(ACCELERATE_GRADIENT_ACCUMULATION_STEPS=str(given)),
            pytest.raises(ValueError, match=f"^ACCELERATE_GRADIENT_ACCUMULATION_STEPS='{given}': must be an"),
        ):
            Accelerator()


def test_the_number_of_micro_batches_may_be_a_text() -> None:
    for side in (THEIRS, OURS):
        with side.accelerator(gradient_accumulation_steps="2") as accelerator:
            assert accelerator.gradient_accumulation_steps == 2


def test_a_schedule_counts_its_calls_in_open_windows_where_the_state_says_so() -> None:
    found: list[list[Any]] = []
    for side in (THEIRS, OURS):
        with side.accelerator(gradient_accumulation_steps=2) as accelerator:
            model = torch.nn.Linear(1, 1)
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
            schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
            found.append([])
            for place in range(8):
                accelerator.gradient_state.plugin_kwargs["adjust_scheduler"] = place >= 4
                with accelerator.accumulate(model):
                    accelerator.backward(model(torch.ones(1, 1)).sum())
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                found[-1].append((schedule.state_dict()["_step_count"], schedule.get_last_lr()))
    assert found[0] == found[1]
    assert [count for count, _ in found[1]] == [1, 2, 2, 3, 4, 5, 6, 7]
