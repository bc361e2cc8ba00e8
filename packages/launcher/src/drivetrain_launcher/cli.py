"""The `drivetrain` command: finds the subcommand, builds its parser, and says what is wrong with a command line.

Subcommands are found through the entry point group `drivetrain.commands`; only the module of the chosen one is
imported, so that `drivetrain --help` answers at once.
"""

import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import cast

from drivetrain_config.errors import ConfigError
from drivetrain_config.installed import EntryPoint
from drivetrain_config.registry import Command, commands
from drivetrain_launcher.errors import LaunchError, UsageError
from drivetrain_launcher.saying import say

# What the shell is told of a command line that cannot be carried out, as by argparse.
_USAGE = 2


def main(tokens: Sequence[str] | None = None) -> int:
    """Run `drivetrain COMMAND ...`.

    Args:
        tokens: The command line; None for the process's own.

    Returns:
        The exit code: 2 for a command line or a setting that is wrong.
    """
    try:
        return _run(sys.argv[1:] if tokens is None else list(tokens))
    except (LaunchError, ConfigError) as error:
        say(f"error: {error}")
        return _USAGE


def _run(tokens: Sequence[str]) -> int:
    found = commands()
    if not tokens or tokens[0] in ("-h", "--help"):
        sys.stdout.write(_overview(found))
        return 0 if tokens else _USAGE
    if tokens[0] in ("-V", "--version"):
        from importlib.metadata import version

        sys.stdout.write(f"drivetrain {version('drivetrain-launcher')}\n")
        return 0
    name, *rest = tokens
    if name not in found:
        near = get_close_matches(name, found, n=1)
        hint = f"; did you mean {near[0]}" if near else ""
        raise UsageError(
            f"{name}: no such command{hint}; the packages installed here bring {', '.join(found)}"
        )
    # A package that does not depend on config gives an object of the same shape.
    command = cast("Command", found[name].load())
    return command.run(_parse(name, command, rest))


def _parse(name: str, command: Command, tokens: Sequence[str]) -> object:
    from drivetrain_launcher.parsing import build_parser

    return build_parser(name, command.arguments, command.help).parse(tokens)


def _overview(found: Mapping[str, EntryPoint]) -> str:
    width = max(map(len, found), default=0)
    lines = [f"  {name:<{width}}  {_summary(point)}" for name, point in found.items()]
    return "\n".join(
        [
            "usage: drivetrain COMMAND [flags] ...",
            "",
            "Write a PyTorch training loop once; run it anywhere by changing the launch.",
            "",
            *lines,
            "",
            "drivetrain COMMAND --help says more of each; drivetrain --version says which this is.",
            "",
        ]
    )


def _summary(point: EntryPoint) -> str:
    """The first line of a command's module, read without running it: a module may import what takes seconds."""
    from ast import get_docstring, parse
    from importlib.util import find_spec

    spec = find_spec(point.value.partition(":")[0])
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return ""
    with open(spec.origin, encoding="utf-8") as source:
        return (get_docstring(parse(source.read())) or "").partition("\n")[0]
