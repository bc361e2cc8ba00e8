"""Ask drivetrain's questions, and write its settings file."""

from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from drivetrain_accelerate.commands.command_line import arguments_of, parser_of, program_of
from drivetrain_accelerate.commands.default_config import default_command_parser, update_command_parser
from drivetrain_config import environ
from drivetrain_config.files.found_file import settings_places
from drivetrain_launcher.cli.commands.config_ask import ConfigArguments, ask_for_launch
from drivetrain_launcher.errors import UsageError
from drivetrain_messages import argument

description = "Ask what matters for a run on this machine, and write it as a settings file of drivetrain's."


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionsArguments:
    """The arguments of `drivetrain accelerate config`."""

    config_file: Path | None = argument(
        None, "File to write, YAML; by default the user's own, ~/.config/drivetrain/config.yaml."
    )
    yes: bool = argument(False, "Take every recommended answer, and ask nothing.")
    force: bool = argument(False, "Replace a file that is there; a copy is kept.")


def run(arguments: QuestionsArguments) -> int:
    """Ask for the settings of a run on this machine, and write a settings file of drivetrain's."""
    place = arguments.config_file
    if place is None:
        users = settings_places(Path.cwd(), environ.child_environment())[-1]
        place = users.file() or users.folder / f"{users.stem}.yaml"
        place.parent.mkdir(parents=True, exist_ok=True)
    try:
        asked = ConfigArguments(output=place, yes=arguments.yes, force=arguments.force)
    except ValueError as error:
        raise UsageError(f"--config_file {place}: {error}") from error
    return ask_for_launch(asked, command="drivetrain accelerate launch")


def get_config_parser(subparsers: Any = None) -> Any:
    """Return the parser of `accelerate config` and its subcommands; add it to `subparsers` if given."""
    parser = config_command_parser(subparsers)
    inner = parser.add_subparsers(title="subcommands", dest="subcommand")
    default_command_parser(inner, [parser])
    update_command_parser(inner, [parser])
    return parser


def config_command(args: Namespace) -> None:
    """Ask for the settings of a run on this machine, and write a settings file of drivetrain's."""
    run(arguments_of(QuestionsArguments, args))


config_command_parser = partial(
    parser_of, "config", QuestionsArguments, config_command, not_in_accelerate=("yes", "force")
)
main = program_of("config")
