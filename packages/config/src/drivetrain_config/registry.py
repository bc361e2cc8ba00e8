"""What the installed packages announce: their sections of settings, and their subcommands."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, is_dataclass
from typing import Any

from drivetrain_config.errors import ConfigError
from drivetrain_config.installed import EntryPoint, entry_points

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
    return [point.name for point in entry_points(SETTINGS_GROUP)]


def sections(*, only: Collection[str] | None = None) -> dict[str, type[Any]]:
    """The installed sections: their dataclasses by name.

    Args:
        only: Load these alone.

    Raises:
        ConfigError: What a package announces as a section is no dataclass.
    """
    points = entry_points(SETTINGS_GROUP)
    return {point.name: _section(point) for point in points if only is None or point.name in only}


def commands() -> dict[str, EntryPoint]:
    """The installed subcommands, not yet imported: `load()` gives an object of the shape of `Command`."""
    return {point.name: point for point in entry_points(COMMANDS_GROUP)}


def _section(point: EntryPoint) -> type[Any]:
    found = point.load()
    if not (isinstance(found, type) and is_dataclass(found)):
        raise ConfigError(
            f"{point.distribution} announces {point.value} as section {point.name!r}; a section is a dataclass"
        )
    return found
