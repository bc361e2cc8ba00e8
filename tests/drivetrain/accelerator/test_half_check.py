"""`precision.check_half` checks the first window of an Accelerator, and says what it found or that it saw none."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain import Accelerator
from drivetrain_precision import HalfPrecisionWarning


def accelerator(steps: int = 1) -> Accelerator:
    return Accelerator(
        mixed_precision="bf16",
        cpu=True,
        gradient_accumulation_steps=steps,
        sections={"precision": {"check_half": True}},
    )


def train(run: Accelerator, loss_of: Callable[[Tensor], Tensor], micro_batches: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(micro_batches):
        with run.accumulate(model):
            run.backward(loss_of(model(torch.ones(2, 4))))
            optimizer.step()
            optimizer.zero_grad()


def by_hand(scores: Tensor) -> Tensor:
    return -F.log_softmax(scores, dim=-1)[:, 0].float().mean()


def test_a_loss_in_half_is_told_once_when_the_first_window_closes() -> None:
    with accelerator(steps=2) as run, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", HalfPrecisionWarning)
        train(run, by_hand, 1)
        assert not told
        train(run, by_hand, 5)
    assert [one.category for one in told] == [HalfPrecisionWarning]
    assert "test_half_check.py" in str(told[0].message)
    assert "log_softmax" in str(told[0].message)


def entropy(scores: Tensor) -> Tensor:
    return F.cross_entropy(scores, torch.tensor([0, 1]))


def test_a_loss_of_outputs_in_half_is_told_and_one_under_the_runs_autocast_is_right() -> None:
    with (
        accelerator() as run,
        pytest.warns(HalfPrecisionWarning, match="cross_entropy, computed in bfloat16"),
    ):
        train(run, entropy, 2)
    with accelerator() as run:
        train(run, run.autocast()(entropy), 2)


def test_a_run_without_micro_batches_is_told_that_nothing_was_checked() -> None:
    run = accelerator()
    with pytest.warns(HalfPrecisionWarning, match="no micro-batch was checked.*accumulate"):
        run.end_training()


def test_the_runs_autocast_is_recorded_with_the_forward_of_a_prepared_model() -> None:
    with Accelerator(mixed_precision="bf16", cpu=True) as run:
        model = run.prepare(nn.Sequential(nn.Linear(4, 4)))
        with run.record_autocast(model) as recorded:
            F.mse_loss(model(torch.ones(2, 4)), torch.ones(2, 4))
    found = {(one.name, one.module): one.dtype for one in recorded.operations()}
    assert found == {("linear", "0"): torch.bfloat16, ("mse_loss", ""): torch.float32}


def test_autocast_decorates_functions_as_torchs_does() -> None:
    with Accelerator(mixed_precision="bf16", cpu=True) as run:
        product = run.autocast()(lambda: torch.ones(2, 2) @ torch.ones(2, 2))
        assert product().dtype is torch.bfloat16
