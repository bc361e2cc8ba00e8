"""What may be said: the sections there are and their fields; anything else is an error that names the nearest."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from drivetrain_config.conversion import ConversionError, convert
from drivetrain_config.errors import ConfigError
from drivetrain_config.kinds import describe, field_types, holds_secret
from drivetrain_config.registry import section_names, sections
from drivetrain_config.source import Entry, Source


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The sections that settings may name: those given in code, and those that installed packages announce.

    Attributes:
        own: The sections given in code, by name; they stand in front of installed ones of the same name.
    """

    own: Mapping[str, type[Any]]

    def names(self) -> list[str]:
        """The sections' names, sorted."""
        return sorted({*self.own, *section_names()})

    def section(self, name: str, source: Source) -> type[Any]:
        """The dataclass of a section.

        Raises:
            ConfigError: There is none of this name; the message names the nearest and lists them all.
        """
        if name in self.own:
            return self.own[name]
        if found := sections(only={name}):
            return found[name]
        known = self.names()
        listed = ", ".join(known) or "none"
        raise ConfigError(
            f"{source}: there is no section {name!r}{nearest(name, known)}; sections here: {listed}"
        )

    def sections_with(self, field: str) -> list[str]:
        """The names of the sections that have a field; all of them are loaded."""
        every = {**sections(), **self.own}
        return sorted(name for name, section in every.items() if field in field_types(section))


def nearest(name: str, known: Iterable[str]) -> str:
    """What may have been meant, to put into a message; empty if nothing comes near."""
    near = get_close_matches(name, list(known), n=1)
    return f", did you mean {near[0]!r}?" if near else ""


def check_field(section: str, field: str, known: Iterable[str], source: Source) -> None:
    """Look whether a section has a field.

    Raises:
        ConfigError: It has not; the message names the nearest and lists them all. The value is left out, for it may
            be a secret under a misspelt name.
    """
    names = list(known)
    if field not in names:
        raise ConfigError(
            f"{source}: section {section!r} has no field {field!r}{nearest(field, names)}; "
            f"its fields: {', '.join(names)}"
        )


def is_secret(section_type: type[Any], field: str) -> bool:
    """Whether a field, or a field of a dataclass inside it, is marked secret."""
    marked = {f.name: bool(f.metadata.get("secret")) for f in fields(section_type)}
    return marked[field] or holds_secret(field_types(section_type)[field])


def converted(section: str, field: str, kind: Any, entry: Entry) -> Any:
    """A value brought to its field's type.

    Raises:
        ConfigError: It cannot be; the message names field, value, what is allowed, and the source.
    """
    try:
        return convert(entry.value, kind, text=entry.is_text)
    except ConversionError as error:
        if entry.secret:  # the details would show parts of it
            raise ConfigError(
                f"{section}.{field}=***: must be {describe(kind)}; from {entry.source}"
            ) from None
        raise ConfigError(f"{section}.{field}={entry.shown}: {error}; from {entry.source}") from error
