"""The settings sections and subcommands that installed packages register."""

from collections.abc import Collection
from dataclasses import is_dataclass
from typing import Any

from drivetrain_config.errors import ConfigError
from drivetrain_config.plugins.installed import EntryPoint, entry_points

SETTINGS_GROUP = "drivetrain.settings"
COMMANDS_GROUP = "drivetrain.commands"


def section_names() -> list[str]:
    """Return the names of the installed sections, sorted, without importing them."""
    return [point.name for point in entry_points(SETTINGS_GROUP)]


def sections(*, only: Collection[str] | None = None) -> dict[str, type[Any]]:
    """Load the dataclasses of the installed sections, or of `only` those of these names, and return them by name.

    ConfigError if a package registers a section that is not a dataclass.
    """
    points = entry_points(SETTINGS_GROUP)
    found: dict[str, type[Any]] = {}
    for point in points:
        if only is None or point.name in only:
            section = point.load()
            if not (isinstance(section, type) and is_dataclass(section)):
                raise ConfigError(
                    f"{point.distribution} announces {point.value} as section {point.name!r}; "
                    "a section is a dataclass"
                )
            found[point.name] = section
    return found


def commands() -> dict[str, EntryPoint]:
    """Return the installed subcommands, not yet imported.

    `load()` returns a function of one frozen dataclass, whose fields are the command's arguments. The function
    returns the exit code, and the first line of its docstring describes the command.
    """
    return {point.name: point for point in entry_points(COMMANDS_GROUP)}
