"""What the installed packages announce: their sections of settings, and their subcommands."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

SETTINGS_GROUP = "drivetrain.settings"
COMMANDS_GROUP = "drivetrain.commands"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A subcommand of `drivetrain`.

    Attributes:
        arguments: A frozen dataclass of its arguments; the parser is built from it as from a section.
        run: Takes the arguments and returns the exit code.
        help: One sentence.
    """

    arguments: type[Any]
    run: Callable[[Any], int]
    help: str


def section_names() -> list[str]:
    """The names of the installed sections, sorted; nothing is imported."""
    return sorted(point.name for point in _points(SETTINGS_GROUP))


def sections(*, only: Collection[str] | None = None) -> dict[str, type[Any]]:
    """The installed sections: their dataclasses by name.

    Args:
        only: Load these alone.
    """
    return {p.name: p.load() for p in _points(SETTINGS_GROUP) if only is None or p.name in only}


def commands() -> dict[str, EntryPoint]:
    """The installed subcommands, not yet imported: `load()` gives an object of the shape of `Command`."""
    return {point.name: point for point in _points(COMMANDS_GROUP)}


@cache
def _points(group: str) -> tuple[EntryPoint, ...]:
    # What is installed does not change while a process runs, and looking it up takes milliseconds.
    return tuple(sorted(entry_points(group=group), key=lambda point: point.name))
