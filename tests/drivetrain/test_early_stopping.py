"""Early stopping: one answer on all ranks, kept in checkpoints."""

from pathlib import Path
from typing import Any

import pytest

from drivetrain import Accelerator, EarlyStopping

QUIET: Any = {"run": {"show_plan": False}}


@pytest.mark.parametrize(
    ("mode", "values", "stops"),
    [
        ("min", [1.0, 0.5, 0.45, 0.3, 0.29, 0.31], [False, False, False, False, False, True]),
        ("max", [0.1, float("nan"), 0.5, 0.45, 0.5], [False, False, False, False, True]),
        ("min", [float("nan"), float("inf")], [False, True]),
    ],
)
def test_it_stops_after_evaluations_without_an_improvement(
    mode: Any, values: list[float], stops: list[bool]
) -> None:
    accelerator = Accelerator(cpu=True, sections=QUIET)
    stopping = EarlyStopping(accelerator, patience=2, min_delta=0.1, mode=mode)
    assert [stopping.should_stop(value) for value in values] == stops
    accelerator.end_training()


@pytest.mark.ranks(2)
def test_all_ranks_follow_the_first_and_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, sections=QUIET, project_dir=tmp_path)
    stopping = EarlyStopping(accelerator, patience=2)
    own = accelerator.process_index
    assert [stopping.should_stop(value - own) for value in (1.0, 2.0)] == [False, False]
    folder = accelerator.save_state()
    assert stopping.should_stop(2.0 - 3 * own)
    accelerator.load_state(folder)
    assert (stopping.best, stopping.num_bad) == (1.0, 1)
    assert stopping.should_stop(1.0)
    accelerator.end_training()


def test_several_have_names_of_their_own() -> None:
    accelerator = Accelerator(cpu=True, sections=QUIET)
    EarlyStopping(accelerator)
    with pytest.raises(ValueError, match="early_stopping"):
        EarlyStopping(accelerator)
    EarlyStopping(accelerator, name="stop_at_accuracy", mode="max")
    accelerator.end_training()


@pytest.mark.parametrize("wrong", [{"patience": 0}, {"min_delta": -1.0}, {"mode": "lowest"}])
def test_numbers_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    accelerator = Accelerator(cpu=True, sections=QUIET)
    with pytest.raises(ValueError, match="patience is at least 1"):
        EarlyStopping(accelerator, **wrong)
    accelerator.end_training()
