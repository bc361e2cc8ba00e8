"""Find every problem of a settings file, while a launch stops at the first problem."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from drivetrain_config.errors import ConfigError
from drivetrain_config.files.settings_file import read_file
from drivetrain_config.settings.layers import Layers, check_mapping
from drivetrain_config.settings.plugin_names import check_plugins
from drivetrain_config.settings.resolution import resolve
from drivetrain_config.settings.schema import specs
from drivetrain_config.settings.vocabulary import Vocabulary, check_field, converted
from drivetrain_config.source import Entry, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReview:
    """The result of a review of a settings file: problems with their lines, and notices.

    Notices name another program's options that drivetrain fulfils differently, and plug-ins that the script must
    provide because no package in this environment does.
    """

    num_settings: int = 0
    problems: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


def review_file(path: Path, *, sections: Mapping[str, type[Any]] | None = None) -> FileReview:
    """Check every field of a file, and every section as a whole; `sections` adds to the installed sections."""
    try:
        contents = read_file(path)
    except ConfigError as error:
        return FileReview(problems=(str(error),))
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
        known = {spec.name: spec for spec in specs(kind, section)}
        valid: dict[tuple[str, str], tuple[Entry, ...]] = {}
        for name, value in (values or {}).items():
            field, source = str(name), Source("file", contents.where(section, str(name)))
            try:
                check_field(section, field, known, source)
                spec = known[field]
                entry = Entry(value, source, secret=spec.secret, file=path.absolute())
                notices += check_plugins(spec, converted(section, field, spec.kind, entry), source)
            except ConfigError as error:
                problems.append(str(error))
            else:
                valid[section, field] = (entry,)
        # A flag or the script may give a field without a default that is missing here.
        is_complete = all((section, name) in valid for name, spec in known.items() if spec.default is MISSING)
        # A problem of one field would show again in the section as a whole.
        if len(valid) == len(values or {}) and is_complete:
            try:
                resolve(kind, section=section, layers=Layers(valid))
            except ConfigError as error:
                problems.append(str(error))
    return FileReview(num_settings=number, problems=tuple(problems), notices=tuple(notices))
