"""One section out of all layers: code > command line > environment > file > default, each field by itself."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Generic, TypeVar

from drivetrain_config import environ
from drivetrain_config.errors import ConfigError
from drivetrain_config.kinds import describe, field_types
from drivetrain_config.layers import Layers
from drivetrain_config.schema import flag_name
from drivetrain_config.source import Entry, Source
from drivetrain_config.vocabulary import check_field, converted, is_secret

Section = TypeVar("Section")


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """A field that code and the command line both name, with different values; code's is taken.

    Attributes:
        field: "section.field".
        taken: The value in code.
        overruled: The value from the command line.
        flag: The flag that gave it.
    """

    field: str
    taken: Any
    overruled: Any
    flag: str

    def __str__(self) -> str:
        overruled = f"{self.flag} on the command line, which says {self.overruled!r}"
        return f"{self.field}={self.taken!r} in code overrules {overruled}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved(Generic[Section]):
    """A section, and where each of its values came from.

    Attributes:
        value: The section.
        sources: The source of each field.
        disagreements: Fields on which code and the command line differ.
    """

    value: Section
    sources: Mapping[str, Source]
    disagreements: tuple[Disagreement, ...] = ()


def resolve(
    section_type: type[Section],
    *,
    section: str,
    code: Mapping[str, object | None] | None = None,
    layers: Layers | None = None,
) -> Resolved[Section]:
    """Resolve a section.

    Args:
        section_type: Its frozen dataclass.
        section: Its name: the key in a file, and the middle of `DRIVETRAIN_<SECTION>__<FIELD>`.
        code: Values given in code; None means not said.
        layers: The other layers; by default those of this process.

    Raises:
        ConfigError: A field is unknown or missing, or a value of the wrong type or outside its range.
    """
    if layers is None:
        layers = Layers.of_process(sections={section: section_type})
    types = field_types(section_type)
    given = _entries(section_type, section, code or {}, layers.of_section(section))
    sources = {name: given[name][0].source if name in given else Source("default") for name in types}
    values: dict[str, Any] = {}
    disagreements: list[Disagreement] = []
    for name, entries in given.items():
        said = [converted(section, name, types[name], entry) for entry in entries]
        values[name] = said[0]
        for other, entry in zip(said[1:], entries[1:], strict=True):
            explicit = entries[0].source.kind == "code" and entry.source.kind == "command line"
            if explicit and other != said[0]:
                disagreements.append(
                    Disagreement(
                        field=f"{section}.{name}", taken=said[0], overruled=other, flag=entry.source.where
                    )
                )
    value = _constructed(section_type, section, values, given)
    return Resolved(value=value, sources=sources, disagreements=tuple(disagreements))


def _entries(
    section_type: type[Any],
    section: str,
    code: Mapping[str, object | None],
    outside: Mapping[str, tuple[Entry, ...]],
) -> dict[str, tuple[Entry, ...]]:
    """What was said of each field, highest layer first."""
    known = field_types(section_type)
    for name in code:
        check_field(section, name, known, Source("code"))
    for name, entries in outside.items():
        check_field(section, name, known, entries[0].source)
    found: dict[str, tuple[Entry, ...]] = {}
    for name in known:
        in_code = code.get(name)
        said = (
            () if in_code is None else (Entry(in_code, Source("code"), secret=is_secret(section_type, name)),)
        )
        if entries := said + outside.get(name, ()):
            found[name] = entries
    return found


def _constructed(
    section_type: type[Section],
    section: str,
    values: Mapping[str, Any],
    given: Mapping[str, tuple[Entry, ...]],
) -> Section:
    _check_complete(section_type, section, values)
    try:
        return section_type(**values)
    except ConfigError:
        raise
    except ValueError as error:
        message = str(error)
        name = message.partition("=")[0]  # by convention the message begins with "field=value"
        if name not in field_types(section_type):
            raise ConfigError(f"section {section!r}: {message}") from error
        source = f"; from {given[name][0].source}" if name in given else ""
        if is_secret(section_type, name):
            hidden = message.replace(repr(values.get(name)), "***")
            raise ConfigError(f"{section}.{hidden}{source}") from None
        raise ConfigError(f"{section}.{message}{source}") from error


def _check_complete(section_type: type[Any], section: str, values: Mapping[str, Any]) -> None:
    types = field_types(section_type)
    for field in fields(section_type):
        required = field.init and field.default is MISSING and field.default_factory is MISSING
        if required and field.name not in values:
            variable = environ.override_name(section, field.name)
            ways = (
                variable
                if is_secret(section_type, field.name)
                else f"{flag_name(section, field.name)}, {variable}"
            )
            raise ConfigError(
                f"{section}.{field.name} has no default and was not given: it must be {describe(types[field.name])}; "
                f"say it in code, by {ways}, or in a file"
            )
