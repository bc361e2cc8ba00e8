import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain.plan.global_batch import scale_accumulation, warn_if_changed

counts = st.integers(1, 512)


@given(counts, counts, counts)
def test_the_micro_batches_of_a_step_stay_or_come_as_near_as_whole_ones_can(
    asked: int, meant_for: int, processes: int
) -> None:
    scaled = scale_accumulation(asked, meant_for=meant_for, processes=processes)
    whole = asked * meant_for
    assert scaled.steps >= 1
    assert scaled.is_exact == (whole % processes == 0)
    off = abs(scaled.steps * processes - whole)
    others = [abs(steps * processes - whole) for steps in (scaled.steps - 1, scaled.steps + 1) if steps >= 1]
    assert all(off <= other for other in others)


@given(counts, counts)
def test_a_number_for_any_number_of_processes_stays_as_it_is(asked: int, processes: int) -> None:
    scaled = scale_accumulation(asked, meant_for=None, processes=processes)
    assert (scaled.steps, scaled.is_exact) == (asked, True)


@pytest.mark.parametrize(("processes", "warned"), [(2, False), (3, True)])
def test_a_batch_that_cannot_be_split_is_warned_of_with_both_numbers(
    caplog: pytest.LogCaptureFixture, processes: int, warned: bool
) -> None:
    with caplog.at_level(logging.WARNING):
        warn_if_changed(scale_accumulation(1, meant_for=4, processes=processes))
    said = [record.getMessage() for record in caplog.records]
    if not warned:
        assert said == []
        return
    assert (
        "a step of 4 micro-batches cannot be split evenly over 3 processes, so it takes 3, 1 on each"
        in said[0]
    )
    assert "the global batch is 0.75 times what it was" in said[0]


def test_a_run_on_fewer_processes_takes_more_micro_batches_and_its_plan_says_why() -> None:
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        sections={"run": {"accumulation_world_size": 4, "show_plan": False}},
    )
    assert accelerator.gradient_accumulation_steps == 8
    (row,) = [row for row in accelerator.plan.rows if row.setting == "run.gradient_accumulation_steps"]
    assert (row.asked, row.applied) == (2, 8)
    assert row.reason == "8 x 1 processes, the 8 micro-batches of 2 x 4 processes"


def test_a_number_of_processes_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="accumulation_world_size=0: must be at least 1 process"):
        Accelerator(cpu=True, sections={"run": {"accumulation_world_size": 0}})


def run(folder: Path, *, batch_size: int, accumulation: int, resume: bool, **settings: Any) -> None:
    """Train a step and save, or load; beside the loader that is trained on, another one is read."""
    sections = {"run": {"show_plan": False, **settings}}
    with Accelerator(
        cpu=True, project_dir=folder, gradient_accumulation_steps=accumulation, sections=sections
    ) as accelerator:
        model = nn.Linear(1, 1)
        data = TensorDataset(torch.ones(64, 1))
        model, optimizer, loader, other = accelerator.prepare(
            model,
            SGD(model.parameters(), lr=0.1),
            DataLoader(data, batch_size=batch_size),
            DataLoader(data, batch_size=2 * batch_size),
        )
        if resume:
            accelerator.load_state()
            return
        assert len(list(other)) > 0
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).mean())
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state()


@pytest.mark.parametrize(
    ("batch_size", "accumulation", "now", "ways"),
    [
        (4, 2, None, None),
        (8, 1, None, None),
        (2, 4, None, None),
        (4, 1, "4 (batches of 4 x 1 processes x 1 micro-batches)", "gradient_accumulation_steps=2"),
        (2, 2, "4 (batches of 2 x 1 processes x 2 micro-batches)", "gradient_accumulation_steps=4"),
        (16, 1, "16 (batches of 16 x 1 processes x 1 micro-batches)", "batches of 8"),
    ],
)
@pytest.mark.default_cases("4-2-None-None", "8-1-None-None")
def test_a_resume_with_other_steps_is_told_with_both_sizes_and_what_keeps_them(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    batch_size: int,
    accumulation: int,
    now: str | None,
    ways: str | None,
) -> None:
    run(tmp_path, batch_size=4, accumulation=2, resume=False)
    run(tmp_path, batch_size=batch_size, accumulation=accumulation, resume=True)
    told = [each.getMessage() for each in caplog.records if "samples of a step" in each.getMessage()]
    if now is None:
        assert told == []
        return
    assert told[0].startswith(
        "the samples of a step of loader 0 change from 8 (batches of 4 x 1 processes x 2"
    )
    assert f"in the checkpoint to {now}: " in told[0]
    assert told[0].endswith(f"What keeps the step: {ways}")
    assert len(told) == 1


def test_a_resume_on_fewer_ranks_is_told_and_kept_by_the_setting_that_is_named(
    tmp_path: Path, run_ranks, caplog: pytest.LogCaptureFixture
) -> None:
    run_ranks(save_on_ranks, tmp_path)
    run(tmp_path, batch_size=4, accumulation=2, resume=True)
    assert "change from 16 (batches of 4 x 2 processes x 2 micro-batches)" in caplog.text
    assert "gradient_accumulation_steps=4; or run.accumulation_world_size=2" in caplog.text
    caplog.clear()
    run(tmp_path, batch_size=4, accumulation=2, resume=True, accumulation_world_size=2)
    assert "samples of a step" not in caplog.text


def save_on_ranks(folder: Path) -> None:
    run(folder, batch_size=4, accumulation=2, resume=False)
