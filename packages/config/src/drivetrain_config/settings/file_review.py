"""Find every problem of a settings file, where reading it for a launch stops at the first."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from drivetrain_config.errors import ConfigError
from drivetrain_config.files.settings_file import Contents, read_file
from drivetrain_config.settings.layers import Layers, check_mapping
from drivetrain_config.settings.plugin_names import check_plugins
from drivetrain_config.settings.resolution import resolve
from drivetrain_config.settings.schema import specs
from drivetrain_config.settings.vocabulary import Vocabulary, check_field, converted, is_secret
from drivetrain_config.source import Entry, Source
from drivetrain_config.values.kinds import field_types


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReview:
    """The result of a review of a settings file: the problems, each with its line, and notices of what is no problem.

    Notices name another program's options that drivetrain meets in another way, and plug-ins that no package provides
    in this environment, but the script may.
    """

    path: Path
    num_settings: int = 0
    problems: tuple[str, ...] = ()
    notices: tuple[str, ...] = field(default=())


def review_file(path: Path, *, sections: Mapping[str, type[Any]] | None = None) -> FileReview:
    """Check every section and field of a file, each section as a whole too; `sections` adds to the installed."""
    try:
        contents = read_file(path)
    except ConfigError as error:
        return FileReview(path=path, problems=(str(error),))
    vocabulary = Vocabulary(sections or {})
    problems: list[str] = []
    notices = list(contents.notices)
    number = 0
    for section, values in contents.data.items():
        try:
            check_mapping(contents, section, values, vocabulary)
            kind = vocabulary.section(section, Source("file", contents.where(section)))
        except ConfigError as error:
            problems.append(str(error))
            continue
        number += len(values or {})
        found, notes = _review_section(contents, section, kind, values or {})
        problems += found
        notices += notes
    return FileReview(path=path, num_settings=number, problems=tuple(problems), notices=tuple(notices))


def _review_section(
    contents: Contents, section: str, kind: type[Any], values: Mapping[Any, Any]
) -> tuple[list[str], list[str]]:
    """Return the problems of a section, and its notes."""
    problems: list[str] = []
    notes: list[str] = []
    valid: dict[tuple[str, str], tuple[Entry, ...]] = {}
    types = field_types(kind)
    known = {spec.name: spec for spec in specs(kind, section)}
    for name, value in values.items():
        source = Source("file", contents.where(section, str(name)))
        entry = Entry(value, source, file=contents.path.absolute())
        try:
            check_field(section, str(name), types, source)
            marked = replace(entry, secret=is_secret(kind, str(name)))
            setting = converted(section, str(name), types[str(name)], marked)
            notes += check_plugins(known[str(name)], setting, source)
        except ConfigError as error:
            problems.append(str(error))
        else:
            valid[section, str(name)] = (marked,)
    # A flag or the script may give a field without a default that is missing here.
    is_complete = all(
        (section, each.name) in valid
        for each in fields(kind)
        if each.init and each.default is MISSING and each.default_factory is MISSING
    )
    if problems or not is_complete:
        return problems, notes  # what is wrong with one field would show again in the section as a whole
    try:
        resolve(kind, section=section, layers=Layers(valid))
    except ConfigError as error:
        problems.append(str(error))
    return problems, notes
