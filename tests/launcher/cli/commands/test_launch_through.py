"""A launch through a module, which runs the script on each rank."""

from collections.abc import Callable

import pytest

from drivetrain_config import Layers
from drivetrain_launcher.cli.commands.launch import LaunchArguments
from drivetrain_launcher.cli.parser import build_parser

# What drivetrain_accelerate's __main__ does, without what it installs.
GATE = """
import sys
from drivetrain_launcher.run.runpy_main import run_as_main
print('gate', sys.argv[1:])
is_module = sys.argv[1] == '-m'
run_as_main(*(sys.argv[2:3] if is_module else sys.argv[1:2]), sys.argv[2 + is_module:], is_module=is_module)
"""
SHOW = "import os, sys; print('script', sys.argv[1:], __name__, os.environ['RANK'], sys.path[0])"


@pytest.fixture(autouse=True)
def gate(script: Callable) -> None:
    script(GATE, "gate.py")


def test_one_process_runs_the_script_through_the_module(
    drivetrain: Callable, script: Callable, tmp_path: object
) -> None:
    script(SHOW, "inner/script.py")
    done = drivetrain("launch", "--through", "gate", "inner/script.py", "--x", "1")
    assert done.stdout == (
        f"gate ['inner/script.py', '--x', '1']\nscript ['--x', '1'] __main__ 0 {tmp_path}/inner\n"
    )
    assert (done.stderr, done.returncode) == ("", 0)


def test_a_module_runs_through_it_too(drivetrain: Callable, script: Callable) -> None:
    script(SHOW, "pkg/train.py")
    done = drivetrain("launch", "--through=gate", "-m", "pkg.train", "-x")
    assert done.stdout.startswith("gate ['-m', 'pkg.train', '-x']\nscript ['-x'] __main__ 0 ")


def test_two_processes_do_and_the_traceback_of_a_failed_one_is_the_scripts(
    drivetrain_with_torch: Callable, script: Callable
) -> None:
    script(
        "import os\nprint('rank', os.environ['RANK'])\nif os.environ['RANK'] == '1': raise ValueError('boom')"
    )
    done = drivetrain_with_torch("launch", "--cpu", "--num-processes", "2", "--through", "gate", "script.py")
    assert "rank 0" in done.stdout
    assert "ValueError: boom" in done.stderr
    assert "gate.py" not in done.stderr
    assert done.returncode == 1


def test_a_file_may_say_it_and_a_plan_shows_the_command(drivetrain: Callable, script: Callable) -> None:
    script(SHOW)
    script("launch: {through: gate}", "drivetrain.yaml")
    assert " -m gate script.py --x" in drivetrain("launch", "--dry-run", "script.py", "--x").stdout
    assert drivetrain("launch", "script.py").stdout.startswith("gate ['script.py']\n")


def test_as_accelerate_is_short_for_the_interface_of_accelerate() -> None:
    parser = build_parser("launch", LaunchArguments, "")
    layers: Layers = parser.parse(["--as-accelerate", "--config", "none", "train.py"]).layers
    (entry,) = layers.of_section("launch")["through"]
    assert entry.value == "drivetrain_accelerate"
    assert entry.source.where == "--as-accelerate"
