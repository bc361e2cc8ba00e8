"""The end of a run, in processes of their own: a pool of ranks needs its group further."""

import pytest

from accelerate_programs import run_program

pytest.importorskip("accelerate")


@pytest.mark.slow
def test_the_process_group_ends_with_the_training_as_under_the_real_one() -> None:
    for ours in (True, False):
        assert run_program("with_end", ours=ours, num_processes=2) == [True, False, 2]


@pytest.mark.slow
def test_a_group_that_the_program_made_stays() -> None:
    assert run_program("with_end", "--own-group", ours=True, num_processes=2) == [True, True, 2]
