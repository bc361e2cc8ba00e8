"""The `drivetrain` command, which finds the subcommand, parses its arguments and reports usage errors.

Subcommands are found through the entry point group `drivetrain.commands`; only the module of the chosen one is
imported, so that `drivetrain --help` is fast. The entry point `checkpoint.list` is called as
`drivetrain checkpoint list`. A name may be both a command and a group: `drivetrain config` beside
`drivetrain config show`.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from drivetrain_clusters.errors import ClusterError
from drivetrain_config.errors import ConfigError
from drivetrain_config.plugins.installed import EntryPoint
from drivetrain_config.plugins.registry import commands
from drivetrain_launcher.cli.help_page import Page
from drivetrain_launcher.cli.overview import first_words, members_of, overview
from drivetrain_launcher.errors import LaunchError, UsageError
from drivetrain_messages import say, suggest
from drivetrain_state.errors import DeviceError

# The exit code for an invalid command line, as with argparse.
_USAGE = 2


def main(tokens: Sequence[str] | None = None) -> int:
    """Run `drivetrain COMMAND ...`, by default that of this process, and return the exit code.

    The code is 2 for an invalid command line or setting.
    """
    try:
        return _run(sys.argv[1:] if tokens is None else list(tokens), commands())
    except (LaunchError, ClusterError, ConfigError, DeviceError) as error:
        say(f"error: {error}")
        return _USAGE


def _run(tokens: Sequence[str], found: Mapping[str, EntryPoint], group: str = "") -> int:
    """Run the command of the first token, or look up the next token in its group."""
    if not tokens or tokens[0] in ("-h", "--help", "--help-all"):
        sys.stdout.write(overview(found, group, Page.of_terminal()))
        return 0 if tokens else _USAGE
    if tokens[0] in ("-V", "--version"):
        from importlib.metadata import version

        sys.stdout.write(f"drivetrain {version('drivetrain-launcher')}\n")
        return 0
    name, *rest = tokens
    members = members_of(found, name)
    is_member_next = bool(members and rest) and not rest[0].startswith("-")
    if name in found and not is_member_next:
        from drivetrain_launcher.cli.command_arguments import load_arguments
        from drivetrain_launcher.cli.parser import build_parser

        arguments, summary = load_arguments(found[name])
        if members:
            others = ", ".join(f"drivetrain {group}{name} {member}" for member in members)
            summary = f"{summary} See also: {others}."
        given = build_parser(f"{group}{name}", arguments, summary).parse(rest)
        return cast("Callable[[Any], int]", found[name].load())(given)
    if members:
        return _run(rest, members, f"{group}{name} ")
    names = first_words(found)
    hint = suggest(name, names, show=lambda near: f"{group}{near}")
    raise UsageError(
        f"{group}{name}: no such command{hint}; the installed packages provide {', '.join(names)}"
    )
