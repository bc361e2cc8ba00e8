"""One section out of all layers: code > command line > environment > file > default, each field by itself."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Generic, TypeVar

from drivetrain_config.conversion import WrongTypeError, convert, field_types
from drivetrain_config.errors import ConfigError
from drivetrain_config.layers import Entry, Layers, Source

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
        return f"{self.field}={self.taken!r} in code overrules {self.flag} {self.overruled!r} on the command line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved(Generic[Section]):
    """A section with where each of its values came from.

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
        section: Its name: in `[section]` of a file and in `DRIVETRAIN_<SECTION>__<FIELD>`.
        code: Values given in code; None means not said.
        layers: The other layers; by default those of this process.

    Returns:
        The section, with the source of each field.

    Raises:
        ConfigError: A field is unknown, or a value of the wrong type or outside its range.
    """
    given = (layers or Layers.of_process()).of_section(section)
    said = {name: value for name, value in (code or {}).items() if value is not None}
    types = field_types(section_type)
    _check_known(section, types, said, given)
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    disagreements: list[Disagreement] = []
    for field in fields(section_type):  # pyright: ignore[reportArgumentType]
        name = field.name
        entries = [Entry(said[name], Source("code"))] if name in said else []
        entries += given.get(name, ())
        sources[name] = entries[0].source if entries else Source("default")
        if not entries:
            continue
        converted = [_converted(section, name, entry, types[name]) for entry in entries]
        values[name] = converted[0]
        for other, entry in zip(converted[1:], entries[1:], strict=True):
            if name in said and entry.source.kind == "command line" and other != converted[0]:
                flag = entry.source.where
                disagreements.append(
                    Disagreement(field=f"{section}.{name}", taken=converted[0], overruled=other, flag=flag)
                )
    value = _constructed(section_type, section, values, sources)
    return Resolved(value=value, sources=sources, disagreements=tuple(disagreements))


def _check_known(
    section: str, types: Mapping[str, Any], said: Mapping[str, Any], given: Mapping[str, tuple[Entry, ...]]
) -> None:
    for name in [*said, *given]:
        if name not in types:
            source = given[name][0].source if name in given else Source("code")
            near = get_close_matches(name, types, n=1)
            raise ConfigError(
                f"{source}: section {section!r} has no field {name!r}"
                f"{f', did you mean {near[0]!r}' if near else ''}; allowed are {', '.join(types)}"
            )


def _converted(section: str, name: str, entry: Entry, kind: Any) -> Any:
    if entry.source.kind == "code":
        return entry.value  # the type checker's business, and the section's own checks
    try:
        return convert(entry.value, kind)
    except WrongTypeError as error:
        raise ConfigError(
            f"{section}.{name}={entry.value!r}: {error}; it was given by {entry.source}"
        ) from error


def _constructed(
    section_type: type[Section], section: str, values: Mapping[str, Any], sources: Mapping[str, Source]
) -> Section:
    try:
        return section_type(**values)
    except ConfigError:
        raise
    except ValueError as error:
        # By convention the message begins with "field=value".
        name = str(error).partition("=")[0]
        given = f"; it was given by {sources[name]}" if name in sources else ""
        raise ConfigError(f"{section}.{error}{given}") from error
