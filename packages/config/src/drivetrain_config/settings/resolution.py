"""Resolve a section from all layers, field by field: code > command line > environment > file > default.

A value in code that equals the field's default may be unintended, as when argparse passes on its own default. It
therefore overrides no other layer: it ranks below the file and above the default.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Generic, TypeVar

from drivetrain_config import environ
from drivetrain_config.errors import ConfigError
from drivetrain_config.settings.layers import Layers
from drivetrain_config.settings.schema import flag_name
from drivetrain_config.settings.vocabulary import check_field, converted, is_secret
from drivetrain_config.source import Entry, Source
from drivetrain_config.values.kinds import describe, field_types

Section = TypeVar("Section")


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingConflict:
    """A field for which code and another layer give different values.

    Attributes:
        field: The field's name, as "section.field".
        taken: The value in force.
        taken_from: The source of the value in force.
        overruled: The value not in force.
        overruled_from: The source of the value not in force.
    """

    field: str
    taken: Any
    taken_from: Source
    overruled: Any
    overruled_from: Source

    def __str__(self) -> str:
        if self.taken_from.kind == "code":
            overruled = f"{self.overruled_from}, which says {self.overruled!r}"
            return f"{self.field}={self.taken!r} {_in_code(self.taken_from)} overrules {overruled}"
        return (
            f"{self.field}={self.taken!r} from {self.taken_from} overrules {self.overruled!r} "
            f"{_in_code(self.overruled_from)}, which is the default and so counts as not given"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved(Generic[Section]):
    """A resolved section, with the source of each value.

    Attributes:
        value: The section's dataclass instance.
        sources: The source of each field, by name.
        disagreements: Fields on which code differs from the command line, or gave way to another layer.
    """

    value: Section
    sources: Mapping[str, Source]
    disagreements: tuple[SettingConflict, ...] = ()


def resolve(
    section_type: type[Section],
    *,
    section: str,
    code: Mapping[str, object | None] | None = None,
    layers: Layers | None = None,
) -> Resolved[Section]:
    """Resolve a section from all layers.

    Args:
        section_type: The frozen dataclass of the section.
        section: The section's name: the key in a file, and the middle of `DRIVETRAIN_<SECTION>__<FIELD>`.
        code: The values given in code; None means not given, and a value equal to the default gives way to any other.
            A value that another than the program chose is an `Entry` with its source; one whose source is not code
            gives way to the layers.
        layers: The other layers; those of this process by default.

    Raises:
        ConfigError: A field is unknown or missing, or a value has the wrong type or is out of range.

    Example:
        >>> @dataclass(frozen=True)
        ... class LoggingSettings:
        ...     every_steps: int = 10
        >>> resolved = resolve(LoggingSettings, section="logging", code={"every_steps": 50}, layers=Layers({}))
        >>> resolved.value.every_steps, str(resolved.sources["every_steps"])
        (50, 'code')
    """
    if layers is None:
        layers = Layers.of_process(sections={section: section_type})
    types = field_types(section_type)
    given = _entries(section_type, section, code or {}, layers.of_section(section))
    said = {
        name: [(converted(section, name, types[name], entry), entry) for entry in entries]
        for name, entries in given.items()
    }
    ranked = {name: _ranked(each, _default(section_type, name)) for name, each in said.items()}
    sources = {name: ranked[name][0][1].source if name in ranked else Source("default") for name in types}
    found = [_disagreement(f"{section}.{name}", each) for name, each in ranked.items()]
    values = {name: each[0][0] for name, each in ranked.items()}
    entries = {name: tuple(entry for _, entry in each) for name, each in ranked.items()}
    value = _constructed(section_type, section, values, entries)
    return Resolved(
        value=value, sources=sources, disagreements=tuple(each for each in found if each is not None)
    )


def _default(section_type: type[Any], name: str) -> Any:
    """Return a field's default; MISSING if it has none."""
    field = next(each for each in fields(section_type) if each.name == name)
    return field.default if field.default_factory is MISSING else field.default_factory()


def _ranked(said: list[tuple[Any, Entry]], default: Any) -> list[tuple[Any, Entry]]:
    """Rank the values of one field, highest first; a value in code that equals the default ranks last."""
    (value, entry), *others = said
    if entry.source.kind == "code" and type(value) is type(default) and value == default:
        return [*others, said[0]]
    return said


def _disagreement(field: str, ranked: list[tuple[Any, Entry]]) -> SettingConflict | None:
    """Return how code and another layer differ; None if they agree, or if code overrides environment or file."""
    (taken, first), (other, last) = ranked[0], ranked[-1]
    if first.source.kind == "code":
        found = [(value, entry) for value, entry in ranked[1:] if entry.source.kind == "command line"]
        other, last = found[0] if found else (taken, first)
    if taken == other or "code" not in (first.source.kind, last.source.kind):
        return None
    return SettingConflict(
        field=field,
        taken="***" if first.secret else taken,
        taken_from=first.source,
        overruled="***" if last.secret else other,
        overruled_from=last.source,
    )


def _entries(
    section_type: type[Any],
    section: str,
    code: Mapping[str, object | None],
    outside: Mapping[str, tuple[Entry, ...]],
) -> dict[str, tuple[Entry, ...]]:
    """Return the entries of each field, highest layer first."""
    known = field_types(section_type)
    for name in code:
        check_field(section, name, known, Source("code"))
    for name, entries in outside.items():
        check_field(section, name, known, entries[0].source)
    found: dict[str, tuple[Entry, ...]] = {}
    for name in known:
        entries = outside.get(name, ())
        if (in_code := code.get(name)) is not None:
            said = in_code if isinstance(in_code, Entry) else Entry(in_code, Source("code"))
            said = replace(said, secret=is_secret(section_type, name))
            entries = (said, *entries) if said.source.kind == "code" else (*entries, said)
        if entries:
            found[name] = entries
    return found


def _in_code(source: Source) -> str:
    return f"of {source.where}" if source.where else "in code"


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
