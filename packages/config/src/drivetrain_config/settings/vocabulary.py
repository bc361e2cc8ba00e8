"""The known sections and fields; any other name raises an error that suggests the nearest."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain_config.errors import ConfigError
from drivetrain_config.plugins.registry import section_names, sections
from drivetrain_config.source import Entry, Source
from drivetrain_config.values.conversion import ConversionError, convert
from drivetrain_config.values.kinds import describe, field_types
from drivetrain_messages import suggest


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The known sections: sections given in code, then sections that installed packages register."""

    own: Mapping[str, type[Any]]

    def names(self) -> list[str]:
        """Return the names of all sections, sorted."""
        return sorted({*self.own, *section_names()})

    def section(self, name: str, source: Source) -> type[Any]:
        """Return the dataclass of a section; ConfigError, with the nearest name and all names, if it is unknown."""
        if name in self.own:
            return self.own[name]
        if found := sections(only={name}):
            return found[name]
        known = self.names()
        listed = ", ".join(known) or "none"
        raise ConfigError(
            f"{source}: there is no section {name!r}{suggest(name, known)}; sections here: {listed}"
        )

    def sections_with(self, field: str) -> list[str]:
        """Return the names of the sections that have a field; this loads all sections."""
        every = {**sections(), **self.own}
        return sorted(name for name, section in every.items() if field in field_types(section))


def check_field(section: str, field: str, known: Iterable[str], source: Source) -> None:
    """Check that a section has a field."""
    names = list(known)
    if field not in names:
        raise ConfigError(
            f"{source}: section {section!r} has no field {field!r}{suggest(field, names)}; "
            f"its fields: {', '.join(names)}"
        )


def converted(section: str, field: str, kind: Any, entry: Entry) -> Any:
    """Convert a value to its field's type; ConfigError, with the allowed values and the source, if impossible."""
    try:
        return convert(entry.value, kind, text=entry.source.kind in ("command line", "environment"))
    except ConversionError as error:
        if entry.secret:  # the details would reveal parts of the secret
            raise ConfigError(
                f"{section}.{field}=***: must be {describe(kind)}; from {entry.source}"
            ) from None
        raise ConfigError(f"{section}.{field}={entry.shown}: {error}; from {entry.source}") from error
