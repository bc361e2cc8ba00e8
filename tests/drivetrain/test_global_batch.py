import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain import Accelerator
from drivetrain.global_batch import scale_accumulation, warn_if_changed

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
