"""The layers settings come from: command line, environment and file, each value with its source.

Precedence, highest first: code, command line, environment, file, default. Code and default stand at the place where a
section is resolved; the layers between them are read here, once, in the launcher, and handed down to the workers.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from drivetrain_config import environ
from drivetrain_config.errors import ConfigError
from drivetrain_config.files import read_file
from drivetrain_config.registry import section_names, sections

Kind = Literal["code", "command line", "environment", "file", "default"]
_ORDER: tuple[Kind, ...] = ("command line", "environment", "file")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value came from.

    Attributes:
        kind: The layer.
        where: The flag, the variable, or the file with its line; empty for code and default.
    """

    kind: Kind
    where: str = ""

    def __str__(self) -> str:
        return f"{self.where} ({self.kind})" if self.where else self.kind


@dataclass(frozen=True, slots=True)
class Entry:
    """One value as it was given: text from a command line or variable, or a typed value from a file."""

    value: Any
    source: Source


@dataclass(frozen=True, slots=True)
class Layers:
    """Every value given outside of code, by section and field, highest layer first."""

    entries: Mapping[tuple[str, str], tuple[Entry, ...]]

    @classmethod
    def read(
        cls,
        *,
        file: Path | None = None,
        command_line: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> "Layers":
        """Read every layer, as the launcher does.

        Args:
            file: A YAML, TOML or JSON file of sections, or one of Accelerate's YAML files.
            command_line: Values from flags, by section and field; None means not said.

        Raises:
            ConfigError: A section is unknown, or the file cannot be read.
        """
        found = [*_of_command_line(command_line or {}), *_of_environment()]
        found += [] if file is None else _of_file(file)
        return _layered(found)

    @classmethod
    def of_process(cls, *, file: Path | None = None) -> "Layers":
        """What a worker or a plain script sees: what the launcher handed down, variables, and a file named in code.

        Raises:
            ConfigError: A section is unknown, or the file cannot be read.
        """
        handed = environ.handed_down()
        found = [] if file is None else _of_file(file)
        found += _of_environment()
        found += [] if handed is None else _of_json(handed)
        return _layered(found)

    def to_json(self) -> str:
        """The text of DRIVETRAIN_CONFIG: every value with its source, secret fields left out."""
        secret = {
            (name, field)
            for name, section in sections(only={section for section, _ in self.entries}).items()
            for field, spec in getattr(section, "__dataclass_fields__", {}).items()
            if spec.metadata.get("secret")
        }
        rows = [
            [section, field, entry.value, entry.source.kind, entry.source.where]
            for (section, field), entries in self.entries.items()
            if (section, field) not in secret
            for entry in entries
        ]
        return json.dumps(rows, default=str)

    def of_section(self, section: str) -> dict[str, tuple[Entry, ...]]:
        """The entries of one section by field."""
        return {field: entries for (name, field), entries in self.entries.items() if name == section}


_Found = tuple[str, str, Entry]


def _layered(found: Iterable[_Found]) -> Layers:
    by_field: dict[tuple[str, str], list[Entry]] = {}
    for section, field, entry in found:
        _check_section(section, entry.source)
        entries = by_field.setdefault((section, field), [])
        if all(entry.source.kind != earlier.source.kind for earlier in entries):
            entries.append(entry)
    ranked = {key: tuple(sorted(v, key=lambda e: _ORDER.index(e.source.kind))) for key, v in by_field.items()}
    return Layers(ranked)


def _of_command_line(given: Mapping[str, Mapping[str, Any]]) -> list[_Found]:
    from drivetrain_config.schema import flag_name

    return [
        (section, field, Entry(value, Source("command line", flag_name(section, field))))
        for section, values in given.items()
        for field, value in values.items()
        if value is not None
    ]


def _of_environment() -> list[_Found]:
    found: list[_Found] = []
    for name, text in sorted(environ.overrides().items()):
        section, field = name.removeprefix("DRIVETRAIN_").lower().split("__", 1)
        found.append((section, field, Entry(text, Source("environment", name))))
    return found


def _of_file(path: Path) -> list[_Found]:
    return [
        (section, field, Entry(value, Source("file", f"{path}:{line}" if line else str(path))))
        for section, field, value, line in read_file(path)
    ]


def _of_json(text: str) -> list[_Found]:
    try:
        return [
            (section, field, Entry(value, Source(kind, where)))
            for section, field, value, kind, where in json.loads(text)
        ]
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{environ.CONFIG_VARIABLE} in the environment cannot be read ({error}): it is written by the launcher; "
            f"unset it, and override single settings with DRIVETRAIN_<SECTION>__<FIELD>"
        ) from error


def _check_section(section: str, source: Source) -> None:
    known = section_names()
    if section not in known:
        near = get_close_matches(section, known, n=1)
        raise ConfigError(
            f"{source}: no section {section!r}{f', did you mean {near[0]!r}' if near else ''}; "
            f"the installed packages have {', '.join(known)}"
        )
