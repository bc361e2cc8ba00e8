"""Processes that multiprocessing starts, as loaders do for their workers."""

from multiprocessing import spawn

import drivetrain_accelerate
from accelerate_programs import run_program
from drivetrain_accelerate.spawned_processes import carry_to_spawned, stop_carrying


def test_spawned_processes_have_the_interface_before_they_import_the_program() -> None:
    found = run_program("with_spawned", ours=True)
    assert found == dict.fromkeys(("here", "spawn", "forkserver"), "drivetrain_accelerate")


def test_what_is_carried_is_taken_back() -> None:
    before = spawn.get_preparation_data
    carry_to_spawned(drivetrain_accelerate.install)
    carry_to_spawned(drivetrain_accelerate.install)
    assert "drivetrain_accelerate" in spawn.get_preparation_data("a")
    stop_carrying()
    stop_carrying()
    assert spawn.get_preparation_data is before
