"""The launchers, over drivetrain's."""

import pytest

from accelerate_programs import run_program
from drivetrain_accelerate import process_launchers
from drivetrain_launcher import LaunchError, RankFailedError


@pytest.mark.slow
def test_a_function_runs_on_processes_that_have_the_interface_too() -> None:
    found = run_program("with_launcher", ours=True)
    assert found == {
        rank: ["words", 2, "drivetrain_accelerate.accelerator.accelerator", "KeyError"] for rank in "01"
    }


@pytest.mark.slow
@pytest.mark.parametrize(("options", "least"), [((), 0.0), (("--no-strict",), 1.0)])
def test_processes_have_the_settings_of_the_one_that_launches_them(
    options: tuple[str, ...], least: float
) -> None:
    found = run_program("with_settings", ours=True, options=options)
    assert found == [["bf16", least]] * 2  # not strict, the smallest is the sum, as in Accelerate


@pytest.mark.slow
def test_an_error_of_a_rank_is_told() -> None:
    def fails() -> None:
        raise KeyError("reason")

    with pytest.raises(RankFailedError, match="KeyError: 'reason'"):
        process_launchers.debug_launcher(fails)


def test_one_process_is_this_one() -> None:
    seen: list[int] = []
    process_launchers.notebook_launcher(seen.append, (3,), num_processes=1)
    assert seen == [3]


def test_what_several_machines_need_is_refused() -> None:
    with pytest.raises(LaunchError, match="num_nodes=2"):
        process_launchers.notebook_launcher(print, num_processes=2, num_nodes=2)


@pytest.mark.slow
def test_the_ranks_of_one_machine_meet_here_by_either_name() -> None:
    process_launchers.notebook_launcher(print, num_processes=2, rdzv_backend="c10d")
    with pytest.raises(LaunchError, match="rdzv_backend='etcd'"):
        process_launchers.notebook_launcher(print, num_processes=2, rdzv_backend="etcd")
