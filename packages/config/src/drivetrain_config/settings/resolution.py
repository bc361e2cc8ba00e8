"""Resolve a section from all layers, field by field: code > command line > environment > file > default.

A value in code that equals the field's default may be unintended: argparse may pass on its own default. The value
therefore overrides no other layer: it ranks below the file and above the default.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, replace
from typing import Any, Generic, TypeVar

from drivetrain_config import environ
from drivetrain_config.errors import ConfigError
from drivetrain_config.settings.layers import Layers
from drivetrain_config.settings.schema import FieldSpec, flag_name, specs
from drivetrain_config.settings.vocabulary import check_field, converted
from drivetrain_config.source import Entry, Source
from drivetrain_config.values.kinds import describe

Section = TypeVar("Section")


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingConflict:
    """A field, as "section.field", for which code and another layer give different values: `taken` is in force."""

    field: str
    taken: Any
    taken_from: Source
    overruled: Any
    overruled_from: Source

    def __str__(self) -> str:
        if self.taken_from.kind == "code":
            overruled = f"{self.overruled_from}, which says {self.overruled!r}"
            return f"{self.field}={self.taken!r} {_name_code(self.taken_from)} overrules {overruled}"
        return (
            f"{self.field}={self.taken!r} from {self.taken_from} overrules {self.overruled!r} "
            f"{_name_code(self.overruled_from)}, which is the default and so counts as not given"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved(Generic[Section]):
    """A resolved section, with the source of each value.

    Attributes:
        disagreements: Fields with different values in code and on the command line, or in code and a layer that won.
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
        code: The values given in code; None means not given. Any layer overrides a value that equals the default. A
            value that a library chose, not the program, is an `Entry` with its source; if the source is not code,
            any layer overrides the value.
        layers: The other layers; by default this process's.

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
    fields = {spec.name: spec for spec in specs(section_type, section)}
    values: dict[str, Any] = {}
    sources = dict.fromkeys(fields, Source("default"))
    disagreements: list[SettingConflict] = []
    for name, entries in _collect_entries(fields, section, code or {}, layers.of_section(section)).items():
        kind, default = fields[name].kind, fields[name].default
        said = [(converted(section, name, kind, entry), entry) for entry in entries]
        value, entry = said[0]
        if entry.source.kind == "code" and type(value) is type(default) and value == default:
            said = [*said[1:], said[0]]  # a default in code ranks last
        values[name], sources[name] = said[0][0], said[0][1].source
        disagreements += _find_disagreements(f"{section}.{name}", said)
    value = _construct(section_type, section, fields, values, sources)
    return Resolved(value=value, sources=sources, disagreements=tuple(disagreements))


def _find_disagreements(field: str, ranked: list[tuple[Any, Entry]]) -> list[SettingConflict]:
    """Return the conflicts of code with other layers, except where code overrides environment or file."""
    (taken, first), (other, last) = ranked[0], ranked[-1]
    if first.source.kind == "code":
        found = [(value, entry) for value, entry in ranked[1:] if entry.source.kind == "command line"]
        other, last = found[0] if found else (taken, first)
    if taken == other or "code" not in (first.source.kind, last.source.kind):
        return []
    conflict = SettingConflict(
        field=field,
        taken="***" if first.secret else taken,
        taken_from=first.source,
        overruled="***" if last.secret else other,
        overruled_from=last.source,
    )
    return [conflict]


def _collect_entries(
    known: Mapping[str, FieldSpec],
    section: str,
    code: Mapping[str, object | None],
    outside: Mapping[str, tuple[Entry, ...]],
) -> dict[str, tuple[Entry, ...]]:
    """Return the entries of each field, highest layer first."""
    for name in code:
        check_field(section, name, known, Source("code"))
    for name, entries in outside.items():
        check_field(section, name, known, entries[0].source)
    found: dict[str, tuple[Entry, ...]] = {}
    for name in known:
        entries = outside.get(name, ())
        if (in_code := code.get(name)) is not None:
            said = in_code if isinstance(in_code, Entry) else Entry(in_code, Source("code"))
            said = replace(said, secret=known[name].secret)
            entries = (said, *entries) if said.source.kind == "code" else (*entries, said)
        if entries:
            found[name] = entries
    return found


def _name_code(source: Source) -> str:
    return f"of {source.where}" if source.where else "in code"


def _construct(
    section_type: type[Section],
    section: str,
    known: Mapping[str, FieldSpec],
    values: Mapping[str, Any],
    sources: Mapping[str, Source],
) -> Section:
    for name, spec in known.items():
        if spec.default is MISSING and name not in values:
            variable = environ.override_name(section, name)
            ways = variable if spec.secret else f"{flag_name(section, name)}, {variable}"
            raise ConfigError(
                f"{section}.{name} has no default and was not given: it must be {describe(spec.kind)}; "
                f"say it in code, by {ways}, or in a file"
            )
    try:
        return section_type(**values)
    except ConfigError:
        raise
    except ValueError as error:
        message = str(error)
        name = message.partition("=")[0]  # by convention the message begins with "field=value"
        if name not in known:
            raise ConfigError(f"section {section!r}: {message}") from error
        source = f"; from {sources[name]}" if name in values else ""
        if known[name].secret:
            hidden = message.replace(repr(values.get(name)), "***")
            raise ConfigError(f"{section}.{hidden}{source}") from None
        raise ConfigError(f"{section}.{message}{source}") from error
