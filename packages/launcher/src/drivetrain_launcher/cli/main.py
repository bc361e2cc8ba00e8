"""The `drivetrain` command, which finds the subcommand, parses its arguments and reports usage errors.

Subcommands are found through the entry point group `drivetrain.commands`; only the module of the chosen one is
imported, so that `drivetrain --help` is fast. The entry point `checkpoint.list` is called as
`drivetrain checkpoint list`. A name may be both a command and a group: `drivetrain config` beside
`drivetrain config show`.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast, get_type_hints

from drivetrain_clusters.errors import ClusterError
from drivetrain_config.errors import ConfigError
from drivetrain_config.plugins.installed import EntryPoint
from drivetrain_config.plugins.registry import commands
from drivetrain_launcher.errors import LaunchError, UsageError
from drivetrain_launcher.module_summary import module_summary
from drivetrain_messages import say, suggest

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
    except (LaunchError, ClusterError, ConfigError) as error:
        say(f"error: {error}")
        return _USAGE


def _run(tokens: Sequence[str], found: Mapping[str, EntryPoint], group: str = "") -> int:
    """Run the command named by the first token, or, if it names a group, look up the next token in the group."""
    if not tokens or tokens[0] in ("-h", "--help"):
        sys.stdout.write(_overview(found, group))
        return 0 if tokens else _USAGE
    if tokens[0] in ("-V", "--version"):
        from importlib.metadata import version

        sys.stdout.write(f"drivetrain {version('drivetrain-launcher')}\n")
        return 0
    name, *rest = tokens
    members = _group(found, name)
    if name in found and not _goes_to_member(rest, members):
        run = cast("Callable[[Any], int]", found[name].load())
        return run(_parse(f"{group}{name}", run, rest, members))
    if members:
        return _run(rest, members, f"{group}{name} ")
    names = _names(found)
    hint = suggest(name, names, show=lambda near: f"{group}{near}")
    raise UsageError(
        f"{group}{name}: no such command{hint}; the installed packages provide {', '.join(names)}"
    )


def _goes_to_member(rest: Sequence[str], members: Mapping[str, EntryPoint]) -> bool:
    """Return whether the tokens after a name choose a command of its group, or try to."""
    return bool(members and rest) and not rest[0].startswith("-")


def _names(found: Mapping[str, EntryPoint]) -> list[str]:
    """Return the valid first tokens: the names of commands and groups."""
    return list(dict.fromkeys(name.partition(".")[0] for name in found))


def _group(found: Mapping[str, EntryPoint], name: str) -> dict[str, EntryPoint]:
    """Return the commands of a group, by their names without the group's prefix."""
    prefix = f"{name}."
    return {full.removeprefix(prefix): point for full, point in found.items() if full.startswith(prefix)}


def _parse(
    name: str, run: Callable[[Any], int], tokens: Sequence[str], members: Mapping[str, EntryPoint]
) -> object:
    """Parse a command line into the dataclass that the command's function takes."""
    from drivetrain_launcher.cli.parser import build_parser

    arguments = next(hint for argument, hint in get_type_hints(run).items() if argument != "return")
    summary = (run.__doc__ or "").partition("\n")[0]
    if members:
        summary = f"{summary} See also: {', '.join(f'drivetrain {name} {member}' for member in members)}."
    return build_parser(name, arguments, summary).parse(tokens)


def _overview(found: Mapping[str, EntryPoint], group: str) -> str:
    names = _names(found)
    width = max(map(len, names), default=0)
    lines = [f"  {name:<{width}}  {_about(name, found)}" for name in names]
    about = (
        _about_group(found)
        if group
        else "Write a PyTorch training loop once; run it anywhere by changing the launch."
    )
    return "\n".join(
        [
            f"usage: drivetrain {group}COMMAND [flags] ...",
            "",
            about,
            "",
            *lines,
            "",
            f"drivetrain {group}COMMAND --help describes each; drivetrain --version prints the version.",
            "",
        ]
    )


def _about(name: str, found: Mapping[str, EntryPoint]) -> str:
    """Return the one-line summary of a command or a group."""
    if name in found:
        return module_summary(found[name].value.partition(":")[0])
    return _about_group(_group(found, name))


def _about_group(members: Mapping[str, EntryPoint]) -> str:
    """Return the summary of the package that contains the modules of a group's commands."""
    first = next(iter(members.values()))
    return module_summary(first.value.partition(":")[0].rpartition(".")[0])
