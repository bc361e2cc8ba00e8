"""Check this installation by drivetrain's checks."""

from argparse import Namespace
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from drivetrain.self_check import CheckArguments
from drivetrain.self_check import run as check
from drivetrain_accelerate.commands.command_line import parser_of, program_of, run_apart
from drivetrain_config import Layers, resolve
from drivetrain_launcher import LaunchSettings
from drivetrain_messages import argument


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallationTestArguments:
    """The arguments of `drivetrain accelerate test`."""

    config_file: Path | None = argument(None, "File that tells the number of processes.")


def run(arguments: InstallationTestArguments) -> int:
    """Check this installation, on as many processes as the settings file says, or on two."""
    layers = Layers.read(file=arguments.config_file)
    count = resolve(LaunchSettings, section="launch", layers=layers).value.num_processes
    arguments_of_check = CheckArguments(layers=layers)
    return check(arguments_of_check if count is None else replace(arguments_of_check, num_processes=count))


def test_command(args: Namespace) -> None:
    """Check this installation, on as many processes as the settings file says, or on two."""
    named = [] if args.config_file is None else ["--config_file", str(args.config_file)]
    run_apart(["test", *named])


test_command_parser = partial(parser_of, "test", InstallationTestArguments, test_command)
main = program_of("test")
