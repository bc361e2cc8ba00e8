"""Loops that pass over batches after a resume: which are an error, and which go on."""

from pathlib import Path

import pytest

from accelerate_resumed_loops import trained_after_resume
from accelerate_sides import OURS
from drivetrain_data import DataStateError

pytest.importorskip("accelerate")


@pytest.mark.parametrize("skip", [0, 1, 2])
@pytest.mark.default_cases("1")
def test_a_loop_that_passes_over_others_goes_on(tmp_path: Path, skip: int) -> None:
    found = trained_after_resume(OURS, tmp_path, num_batches=6, skip=skip, num_epochs=2)
    assert found == [*range(3 + skip, 6), *range(6)]


@pytest.mark.parametrize("num_batches", [5, 6, 7])
@pytest.mark.default_cases("6")
def test_what_would_train_nothing_is_an_error_however_little_is_left(
    tmp_path: Path, num_batches: int
) -> None:
    with pytest.raises(
        DataStateError, match=r"passed over before the first backward.*Leave out the program's own"
    ):
        trained_after_resume(OURS, tmp_path, num_batches=num_batches, skip=3, num_epochs=2)


def test_a_loop_that_trains_may_pass_over_later_ones(tmp_path: Path) -> None:
    assert trained_after_resume(OURS, tmp_path, num_batches=12, skip=0)[-1] == 11
