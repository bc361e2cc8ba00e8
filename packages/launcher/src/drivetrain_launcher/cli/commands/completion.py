"""Print a script that completes the command line in bash, zsh or fish."""

import sys
from dataclasses import dataclass, field

from drivetrain_config import commands
from drivetrain_launcher.cli.completion.bash_script import bash_script
from drivetrain_launcher.cli.completion.command_words import read_commands, section_flags
from drivetrain_launcher.cli.completion.fish_script import fish_script
from drivetrain_launcher.cli.completion.zsh_script import zsh_script
from drivetrain_messages import suggest

_SCRIPTS = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionArguments:
    """The arguments of `drivetrain completion`."""

    shell: str = field(metadata={"positional": True, "help": "Shell to complete in: bash, zsh or fish."})

    def __post_init__(self) -> None:
        if self.shell not in _SCRIPTS:
            hint = suggest(self.shell, _SCRIPTS)
            raise ValueError(f"shell={self.shell!r}: there is no such script{hint}; say bash, zsh or fish")


def run(arguments: CompletionArguments) -> int:
    """Print a script that completes commands, flags, values and files of the installed packages."""
    sys.stdout.write(_SCRIPTS[arguments.shell](read_commands(commands()), section_flags()))
    return 0
