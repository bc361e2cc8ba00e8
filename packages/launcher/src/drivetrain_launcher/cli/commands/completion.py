"""Print a script that completes commands in a shell."""

import sys
from dataclasses import dataclass

from drivetrain_config import commands
from drivetrain_launcher.cli.completion.command_words import read_commands, section_flags
from drivetrain_launcher.cli.completion.shell_scripts import SHELLS, shell_script
from drivetrain_messages import argument, suggest


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionArguments:
    """The arguments of `drivetrain completion`."""

    shell: str = argument(..., "Shell to complete in: bash, zsh or fish.", positional=True)

    def __post_init__(self) -> None:
        if self.shell not in SHELLS:
            hint = suggest(self.shell, SHELLS)
            raise ValueError(f"shell={self.shell!r}: there is no such script{hint}; say bash, zsh or fish")


def run(arguments: CompletionArguments) -> int:
    """Print a script that completes commands, flags, values and files of the installed packages."""
    sys.stdout.write(shell_script(arguments.shell, read_commands(commands()), section_flags()))
    return 0
