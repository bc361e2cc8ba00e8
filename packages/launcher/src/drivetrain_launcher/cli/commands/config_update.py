"""Change settings of a file, and keep its comments."""

import sys
from dataclasses import dataclass
from pathlib import Path

from drivetrain_launcher.cli.commands.config_validate import file_or_found
from drivetrain_launcher.wizard.settings_text import write_settings
from drivetrain_launcher.wizard.settings_update import updated_text
from drivetrain_messages import argument


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigUpdateArguments:
    """The arguments of `drivetrain config update`."""

    file: Path | None = argument(
        None, "Settings file to change; the one that a launch finds by default.", positional=True
    )
    set: tuple[str, ...] = argument(
        (), "Setting to write, as run.mixed_precision=bf16; may be repeated.", repeated=True
    )
    unset: tuple[str, ...] = argument((), "Setting to take out, as run.seed; may be repeated.", repeated=True)


def run(arguments: ConfigUpdateArguments) -> int:
    """Change settings of a file with its comments kept; a file of Accelerate becomes one of drivetrain."""
    path = file_or_found(arguments.file)
    text, lines = updated_text(path, arguments.set, arguments.unset)
    if not lines:
        sys.stdout.write(f"{path}: nothing to change\n")
        return 0
    kept = write_settings(path, text)
    sys.stdout.write("\n".join([*lines, f"wrote {path}; the one that was there is {kept}", ""]))
    return 0
