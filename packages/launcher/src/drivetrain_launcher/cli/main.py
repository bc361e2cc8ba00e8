"""The `drivetrain` command, which finds the subcommand, parses its arguments and reports usage errors.

Subcommands are found through the entry point group `drivetrain.commands`; only the module of the chosen one is
imported, so that `drivetrain --help` is fast. The entry point `checkpoint.list` is called as
`drivetrain checkpoint list`. A name may be both a command and a group: `drivetrain config` beside
`drivetrain config show`.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from posixpath import commonpath
from typing import Any, cast, get_type_hints

from drivetrain_clusters.errors import ClusterError
from drivetrain_config.errors import ConfigError
from drivetrain_config.plugins.installed import EntryPoint
from drivetrain_config.plugins.registry import commands
from drivetrain_launcher.errors import LaunchError, UsageError
from drivetrain_launcher.module_summary import module_summary
from drivetrain_messages import format_table, say, suggest
from drivetrain_state.errors import DeviceError

# The exit code for an invalid command line, as with argparse.
_USAGE = 2


def main(tokens: Sequence[str] | None = None) -> int:
    """Run `drivetrain COMMAND ...`.

    Args:
        tokens: The command-line arguments; None for those of this process.

    Returns:
        The exit code; 2 for an invalid command line or setting.
    """
    try:
        return _run(sys.argv[1:] if tokens is None else list(tokens), commands())
    except (LaunchError, ClusterError, ConfigError, DeviceError) as error:
        say(f"error: {error}")
        return _USAGE


def _run(tokens: Sequence[str], found: Mapping[str, EntryPoint], group: str = "") -> int:
    """Run the command of the first token, or look up the next token in its group."""
    if not tokens or tokens[0] in ("-h", "--help"):
        sys.stdout.write(_overview(found, group))
        return 0 if tokens else _USAGE
    if tokens[0] in ("-V", "--version"):
        from importlib.metadata import version

        sys.stdout.write(f"drivetrain {version('drivetrain-launcher')}\n")
        return 0
    name, *rest = tokens
    members = _members(found, name)
    is_member_next = bool(members and rest) and not rest[0].startswith("-")
    if name in found and not is_member_next:
        from drivetrain_launcher.cli.parser import build_parser

        run = cast("Callable[[Any], int]", found[name].load())
        arguments = next(hint for argument, hint in get_type_hints(run).items() if argument != "return")
        summary = (run.__doc__ or "").partition("\n")[0]
        if members:
            others = ", ".join(f"drivetrain {group}{name} {member}" for member in members)
            summary = f"{summary} See also: {others}."
        return run(build_parser(f"{group}{name}", arguments, summary).parse(rest))
    if members:
        return _run(rest, members, f"{group}{name} ")
    names = _first_words(found)
    hint = suggest(name, names, show=lambda near: f"{group}{near}")
    raise UsageError(
        f"{group}{name}: no such command{hint}; the installed packages provide {', '.join(names)}"
    )


def _first_words(found: Mapping[str, EntryPoint]) -> list[str]:
    """Return the names of commands and groups."""
    return list(dict.fromkeys(name.partition(".")[0] for name in found))


def _members(found: Mapping[str, EntryPoint], group: str) -> dict[str, EntryPoint]:
    """Return the commands of a group, by name without the group's prefix."""
    prefix = f"{group}."
    return {full.removeprefix(prefix): point for full, point in found.items() if full.startswith(prefix)}


def _overview(found: Mapping[str, EntryPoint], group: str) -> str:
    rows = [
        (
            name,
            module_summary(found[name].value.partition(":")[0])
            if name in found
            else _summary_of_group(_members(found, name)),
        )
        for name in _first_words(found)
    ]
    about = "Write a PyTorch training loop once; run it anywhere by changing the launch."
    return (
        f"usage: drivetrain {group}COMMAND [flags] ...\n\n"
        f"{_summary_of_group(found) if group else about}\n\n"
        f"{format_table(rows, indent='  ')}\n\n"
        f"drivetrain {group}COMMAND --help describes each; drivetrain --version prints the version.\n"
    )


def _summary_of_group(members: Mapping[str, EntryPoint]) -> str:
    """Return the summary of the package that contains the modules of all commands of a group."""
    modules = [point.value.partition(":")[0] for point in members.values()]
    folders = [module.rpartition(".")[0].replace(".", "/") for module in modules]
    return module_summary(commonpath(folders).replace("/", "."))
