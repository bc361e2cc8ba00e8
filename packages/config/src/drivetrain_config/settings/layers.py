"""The layers of settings outside code: command line, environment and file, each value with its source.

Precedence, highest first: code, command line, environment, file, default. `resolve` adds code and defaults; the
launcher reads and checks the layers between them once, with this module, and hands them to the workers.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drivetrain_config import environ
from drivetrain_config.errors import ConfigError
from drivetrain_config.files.found_file import SettingsFile
from drivetrain_config.files.settings_file import Contents, read_file
from drivetrain_config.settings.schema import FieldSpec, flag_name, specs
from drivetrain_config.settings.vocabulary import Vocabulary, check_field, converted
from drivetrain_config.source import Entry, Kind, Source
from drivetrain_config.values.kinds import field_types, plain

logger = logging.getLogger(__name__)

# The layers outside code, highest first.
PRECEDENCE: tuple[Kind, ...] = ("command line", "environment", "file")
_MOST_SHOWN = 60  # characters shown of a variable that cannot be parsed
_Found = tuple[str, str, Entry]  # section, field, entry


@dataclass(frozen=True, slots=True)
class Layers:
    """The values given outside code, by section and field, highest layer first.

    Attributes:
        file: The settings file that the launcher read; None without one, and in a worker.
    """

    entries: Mapping[tuple[str, str], tuple[Entry, ...]]
    file: SettingsFile | None = None

    @classmethod
    def read(
        cls,
        *,
        file: Path | SettingsFile | None = None,
        command_line: Mapping[str, Mapping[str, Any]] | None = None,
        written: Mapping[tuple[str, str], str] | None = None,
        sections: Mapping[str, type[Any]] | None = None,
    ) -> "Layers":
        """Read and check every layer, as the launcher does.

        Args:
            file: A YAML, TOML or JSON file of sections or another program's file that a package translates: its path
                or the result of `choose_file`.
            command_line: The values of flags, by section and field; None means not given.
            written: The flags as the user wrote them, by section and field, if they differ from the fields' own.
            sections: Section dataclasses in addition to those that installed packages register.

        Raises:
            ConfigError: A section or field is unknown, a value has the wrong type, or the file cannot be read.
        """
        vocabulary = Vocabulary(sections or {})
        chosen = SettingsFile(path=file) if isinstance(file, Path) else file
        by_flag: list[_Found] = []
        for section, values in (command_line or {}).items():
            for field, value in values.items():
                flag = (written or {}).get((section, field))
                if value is not None:
                    flag = flag or flag_name(section, field, negated=value is False)
                    by_flag.append((section, field, Entry(value, Source("command line", flag))))
        given = [
            *by_flag,
            *_read_environment(vocabulary),
            *_read_sections(None if chosen is None else chosen.path, vocabulary),
        ]
        return cls(_rank(_check(given, vocabulary)), chosen)

    @classmethod
    def of_process(
        cls, *, file: Path | None = None, sections: Mapping[str, type[Any]] | None = None
    ) -> "Layers":
        """Read the layers of a worker or plain script: the launcher's values, the environment, a file named in code.

        Arguments and errors are as for `read`; each field of the file takes precedence over the launcher's file.
        """
        vocabulary = Vocabulary(sections or {})
        given = [*_read_sections(file, vocabulary), *_read_environment(vocabulary)]
        return cls(_rank([*_check(given, vocabulary), *_read_handed_down(environ.handed_down())]))

    def to_json(self) -> str:
        """Return the text of DRIVETRAIN_CONFIG: every value with its source.

        The values of secret fields are left out: a worker inherits the variable or reads the file itself.
        """
        rows: list[dict[str, Any]] = []
        for (section, field), entries in self.entries.items():
            for entry in entries:
                source = {"kind": entry.source.kind, "where": entry.source.where}
                row = {"section": section, "field": field, **source}
                if not entry.secret:
                    rows.append({**row, "value": plain(entry.value)})
                elif entry.file is not None:
                    rows.append({**row, "file": str(entry.file)})
        return json.dumps({"settings": rows})

    def of_section(self, section: str) -> dict[str, tuple[Entry, ...]]:
        """Return the entries of one section, by field."""
        return {field: entries for (name, field), entries in self.entries.items() if name == section}


def _rank(given: Iterable[_Found]) -> dict[tuple[str, str], tuple[Entry, ...]]:
    """Group entries by field, highest layer first; keep the first entry of each layer."""
    by_field: dict[tuple[str, str], dict[Kind, Entry]] = {}
    for section, field, entry in given:
        by_field.setdefault((section, field), {}).setdefault(entry.source.kind, entry)
    return {key: tuple(of[kind] for kind in PRECEDENCE if kind in of) for key, of in by_field.items()}


def _check(given: Iterable[_Found], vocabulary: Vocabulary) -> list[_Found]:
    """Check every value against its field. The launcher then reports a mistake once, before any worker starts."""
    checked: list[_Found] = []
    known: dict[str, dict[str, FieldSpec]] = {}
    for section, field, entry in given:
        if section not in known:
            listed = specs(vocabulary.section(section, entry.source), section)
            known[section] = {spec.name: spec for spec in listed}
        check_field(section, field, known[section], entry.source)
        spec = known[section][field]
        if spec.secret and entry.source.kind == "command line":
            raise ConfigError(
                f"{section}.{field}=***: is secret, but every user of the machine can see command lines; set it in "
                f"{environ.override_name(section, field)} or in a file"
            )
        marked = replace(entry, secret=spec.secret)
        converted(section, field, spec.kind, marked)
        checked.append((section, field, marked))
    return checked


def _read_environment(vocabulary: Vocabulary) -> list[_Found]:
    found: list[_Found] = []
    for name, text in environ.overrides().items():
        words = name.removeprefix(environ.PREFIX).lower()
        section, mark, field = words.partition("__")
        if mark:
            found.append((section, field, Entry(text, Source("environment", name))))
            continue
        if homes := vocabulary.sections_with(words):  # such as DRIVETRAIN_SEED
            meant = " or ".join(environ.override_name(section, words) for section in homes)
            raise ConfigError(
                f"{name} in the environment sets nothing: a variable names its section, {meant}"
            )
        # What begins with a section's name, such as DRIVETRAIN_RUN_SEED, is most likely misspelled.
        for section in vocabulary.names():
            field = words.removeprefix(f"{section}_")
            if field == words:
                continue
            if field in field_types(vocabulary.section(section, Source("environment", name))):
                raise ConfigError(
                    f"{name} in the environment sets nothing: two underscores stand between section and field, "
                    f"{environ.override_name(section, field)}"
                )
            if _is_first():
                logger.warning(
                    "%s in the environment sets nothing: section %r has no field %r", name, section, field
                )
    return found


def _read_sections(path: Path | None, vocabulary: Vocabulary) -> list[_Found]:
    if path is None:
        return []
    contents = read_file(path)
    if _is_first():
        for line in contents.notices:
            logger.warning("%s", line)
    found: list[_Found] = []
    for section, values in contents.data.items():
        check_mapping(contents, section, values, vocabulary)
        for field, value in (values or {}).items():
            source = Source("file", contents.where(section, str(field)))
            found.append((section, str(field), Entry(value, source, file=path.absolute())))
    return found


def _is_first() -> bool:
    """Return whether this process warns: the launcher, a plain script, or rank 0 of the workers."""
    return environ.read("RANK") in (None, "0")


def check_mapping(contents: Contents, section: str, values: object, vocabulary: Vocabulary) -> None:
    """Check that a top-level key names a section and holds a mapping.

    An empty section is checked too, because its name may be misspelled. A single value is most likely a field outside
    its section.
    """
    where = contents.where(section)
    if values is None or isinstance(values, Mapping):
        vocabulary.section(section, Source("file", where))
        return
    known = vocabulary.names()
    if section in known:
        kind = "a list" if isinstance(values, list) else "a single value"
        raise ConfigError(f"{where}: section {section!r} must be a mapping of fields to values, not {kind}")
    homes = vocabulary.sections_with(section)
    meant = f" it is a field of {' and '.join(homes)}: write it below that name." if homes else ""
    raise ConfigError(
        f"{where}: {section!r} stands in no section;{meant} A file holds sections, each a mapping of fields to "
        f"values; sections here: {', '.join(known)}"
    )


def _read_handed_down(text: str | None) -> list[_Found]:
    if text is None:
        return []
    try:
        rows = json.loads(text)["settings"]
        if not isinstance(rows, list):
            raise TypeError("the settings are no list")
        found: list[_Found] = []
        for row in rows:
            section, field, source = row["section"], row["field"], Source(row["kind"], row["where"])
            if source.kind not in PRECEDENCE:
                raise KeyError(source.kind)
            if "file" not in row:
                found.append((section, field, Entry(row["value"], source)))
                continue
            path = Path(row["file"])
            values = read_file(path).data.get(section) or {}
            if field not in values:
                raise ConfigError(
                    f"{path}: {section}.{field} was set when the run was launched, and is no longer set; secrets are "
                    "read by each process: put it back, or launch again"
                )
            found.append((section, field, Entry(values[field], source, secret=True, file=path)))
        return found
    except (json.JSONDecodeError, KeyError, TypeError, RecursionError) as error:
        shown = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
        raise ConfigError(
            f"{environ.CONFIG_VARIABLE}={shown} in the environment cannot be read: the launcher writes it, as a "
            "mapping with 'settings', a list of settings with their sources; unset it, and say single settings as "
            "DRIVETRAIN_<SECTION>__<FIELD>"
        ) from error
