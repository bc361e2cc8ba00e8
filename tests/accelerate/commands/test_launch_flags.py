"""The parser of `accelerate launch`, against the real one."""

import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest

from drivetrain_accelerate.commands import interface_launch as ours
from drivetrain_accelerate.commands.interface_launch import (
    clean_option,
    launch_command,
    prepare_simple_launcher_cmd_env,
)
from drivetrain_accelerate.commands.launch_flags import words_of

pytest.importorskip("accelerate", reason="the interface is held against the real one")

from accelerate.commands import launch as real

LINES = [
    ["train.py"],
    ["--num_processes", "2", "--mixed-precision", "bf16", "train.py", "--num_processes", "3", "-x"],
    ["-m", "pkg.train", "--lr", "1"],
    ["--use_fsdp", "--fsdp_version", "2", "--fsdp_sharding_strategy", "FULL_SHARD", "train.py"],
    ["-q", "-t", "3", "--tpu_cluster", "--env", "A=1", "--env", "B=2", "--debug", "train.py"],
    ["--gpu_ids=0,1", "--fp8_override_linear_precision", "true,false,true", "--tpu", "train.py"],
    [
        "--fsdp-transformer-layer-cls-to-wrap",
        "A,B",
        "--zero_stage",
        "3",
        "--gradient_clipping",
        "0.5",
        "train.py",
    ],
]


def flags_of(parser: ArgumentParser) -> dict[tuple[str, ...], tuple[Any, ...]]:
    return {
        tuple(sorted(action.option_strings)) or (action.dest,): (
            action.dest,
            1 if action.default == "true" and action.type is not str else action.default,  # as it is parsed
            None if action.choices is None else list(action.choices),
            action.nargs,
        )
        for action in parser._actions
        if action.dest not in ("help",) and action.option_strings != ["--no_tpu_cluster", "--no-tpu-cluster"]
    }


def test_every_flag_is_that_of_the_real_one() -> None:
    assert flags_of(ours.launch_command_parser()) == flags_of(real.launch_command_parser())


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_is_parsed_as_by_the_real_one(line: list[str]) -> None:
    assert vars(ours.launch_command_parser().parse_args(line)) == vars(
        real.launch_command_parser().parse_args(line)
    )


@pytest.mark.parametrize("line", LINES)
def test_what_was_parsed_is_written_again(line: list[str]) -> None:
    parser = ours.launch_command_parser()
    args = parser.parse_args(line)
    assert vars(parser.parse_args(words_of(args))) == vars(args)


def test_a_value_that_a_program_sets_is_written() -> None:
    args = ours.launch_command_parser().parse_args(["train.py"])
    args.num_processes, args.cpu = 2, True
    assert words_of(args) == ["--cpu", "--num_processes", "2", "train.py"]


def test_options_are_cleaned_as_by_the_real_one() -> None:
    for option in ("--a_b-c", "-m", "--cpu"):
        assert clean_option(option) == real.clean_option(option)


@pytest.mark.slow
def test_a_program_starts_a_launch_and_hears_of_its_failure(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import accelerate, sys\nprint(type(accelerate).__name__, sys.argv[1:])\nsys.exit(3)")
    args = ours.launch_command_parser().parse_args(["--cpu", str(script), "--x"])
    with pytest.raises(subprocess.CalledProcessError, match="exit status 3"):
        launch_command(args)
    assert capfd.readouterr().out == "InterfaceModule ['--x']\n"
    args.quiet = True
    with pytest.raises(SystemExit, match="3"):
        launch_command(args)


def test_the_command_of_a_launch_is_told() -> None:
    args = ours.launch_command_parser().parse_args(["--num_processes", "2", "train.py", "--x"])
    command, environment = prepare_simple_launcher_cmd_env(args)
    assert command[0] == sys.executable
    assert command[-4:] == ["--num_processes", "2", "train.py", "--x"]
    assert "PATH" in environment
