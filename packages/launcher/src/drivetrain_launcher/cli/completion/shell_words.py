"""The words of commands as the scripts of all shells need them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from drivetrain_launcher.cli.completion.command_words import CommandWords, FlagWords

# What a choice may hold: bash expands the words that it completes, so that others would run as commands.
_HARMLESS = re.compile(r"[\w.:/+@%,-]+")


def first_words(commands: Sequence[CommandWords]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the valid first words, and the second words of each group."""
    first = list(dict.fromkeys(command.name.partition(" ")[0] for command in commands))
    groups: dict[str, list[str]] = {}
    for command in commands:
        group, space, name = command.name.partition(" ")
        if space:
            groups.setdefault(group, []).append(name)
    return first, groups


def value_cases(
    commands: Sequence[CommandWords], shared: Sequence[FlagWords]
) -> Iterator[tuple[str | None, FlagWords]]:
    """Yield each flag whose value can be completed, with its command; None for a flag of all commands."""
    found = [(command.name, flag) for command in commands for flag in command.flags]
    for name, flag in [*found, *((None, flag) for flag in shared)]:
        choices = harmless_choices(flag)
        if choices or flag.is_path:
            yield name, replace(flag, choices=choices)


def harmless_choices(flag: FlagWords) -> tuple[str, ...]:
    """Return the values of a flag that no shell reads as anything but a word."""
    return tuple(choice for choice in flag.choices if _HARMLESS.fullmatch(choice))


def about(text: str) -> str:
    """Return a description in one line, cut where a menu would wrap it."""
    line = " ".join(text.split())
    return line if len(line) <= 80 else f"{line[:77].rstrip()}..."
