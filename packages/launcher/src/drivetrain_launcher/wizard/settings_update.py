"""Change settings in the text of a file, with its comments and its order kept, by the library ruamel.yaml."""

from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from drivetrain_config import ConfigError, Source, sections
from drivetrain_config.files.settings_file import read_file
from drivetrain_config.settings.file_review import review_file
from drivetrain_config.settings.plugin_names import check_plugins
from drivetrain_config.settings.schema import FieldSpec, specs
from drivetrain_config.settings.vocabulary import Vocabulary, check_field, converted
from drivetrain_config.source import Entry
from drivetrain_config.values.kinds import field_types, plain
from drivetrain_launcher.errors import LaunchError, UsageError
from drivetrain_launcher.wizard.questionnaire import GivenAnswer
from drivetrain_launcher.wizard.settings_text import settings_text, yaml_value


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChange:
    """A setting to write.

    Attributes:
        section: The section of the field.
        field: The field to set.
        text: The value as typed.
    """

    section: str
    field: str
    text: str


def parse_change(text: str) -> SettingChange:
    """Parse the text of a change, `section.field=value`.

    Raises:
        UsageError: The text has another form.
    """
    name, equals, value = text.partition("=")
    section, dot, field = name.strip().partition(".")
    if not (equals and dot and section and field):
        raise UsageError(f"{text!r}: say SECTION.FIELD=VALUE, such as run.mixed_precision=bf16")
    return SettingChange(section=section, field=field, text=value.strip())


def updated_text(
    path: Path, changes: Sequence[SettingChange], removals: Sequence[tuple[str, str]]
) -> tuple[str, list[str]]:
    """Return the new text of a file, and a line for each change; no lines if nothing changes.

    Raises:
        ConfigError: A setting is unknown or has a wrong value, or the file would be invalid.
        LaunchError: The file is not YAML, or the library that keeps its comments is missing.
    """
    if path.suffix not in (".yaml", ".yml"):
        raise LaunchError(f"{path}: only a YAML file is changed here; change it by hand")
    contents = read_file(path)
    text, lines = path.read_text(encoding="utf-8"), []
    if _is_translated(path, contents.data):
        text = _converted(path)
        lines = [f"{path}: was Accelerate's, and is drivetrain's now", *contents.notices]
    if changes or removals:
        text, changed = _edited(text, changes, removals)
        lines += changed
    _check(path, text)
    return text, lines


def _is_translated(path: Path, data: Any) -> bool:
    """Return whether the settings read are not those that the file spells: it is Accelerate's."""
    return set(data) != set(_document(path.read_text(encoding="utf-8")) or {})


def _converted(path: Path) -> str:
    """Return an Accelerate file as drivetrain's, each setting with its help."""
    contents, kinds = read_file(path), sections()
    answers = {
        (section, field): GivenAnswer(value=value, why=f"as in {contents.where(section, field)}")
        for section, values in contents.data.items()
        for field, value in values.items()
    }
    return settings_text(
        answers, kinds, heading=[f"The settings of a drivetrain run, converted from {path}."]
    )


def _edited(
    text: str, changes: Sequence[SettingChange], removals: Sequence[tuple[str, str]]
) -> tuple[str, list[str]]:
    document = _document(text)
    document = _yaml().map() if document is None else document
    lines: list[str] = []
    for change in changes:
        value, notes = _value(change)
        values = document.get(change.section)
        if values is None:
            values = document[change.section] = _yaml().map()
        before = yaml_value(plain(values[change.field])) if change.field in values else "unset"
        after = yaml_value(value)
        if before == after:
            continue
        is_new = change.field not in values
        values[change.field] = value
        if is_new:
            values.yaml_set_comment_before_after_key(
                change.field, before=_help(change.section, change.field), indent=2
            )
        lines += [f"{change.section}.{change.field}: {before} -> {after}", *notes]
    text = _text(document)
    for section, field in removals:
        _check_name(section, field)
        values = _document(text).get(section) or {}
        if field in values:
            lines.append(f"{section}.{field}: {yaml_value(plain(values[field]))} -> unset")
            text = _without(text, section, field)
    return text, lines


def _without(text: str, section: str, field: str) -> str:
    """Return the text of a file without a setting and its help; all other comments stay where they are.

    The library keeps a comment with the key before it, so that taking a key out of its document would take the
    comment of the next one along, and leave its own.
    """
    document = _document(text)
    values = document[section]
    if values.fa.flow_style() or len(values) == 1:
        del values[field]
        return _text(document)
    lines = text.splitlines(keepends=True)
    (begin, indent) = values.lc.key(field)
    end = begin + 1
    while end < len(lines) and _continues(lines[end], indent):
        end += 1
    help_text, shown = _help(section, field).split(), list[str]()
    for above in range(begin - 1, -1, -1):
        line = lines[above].strip()
        if not line.startswith("#"):
            break
        shown = line.lstrip("# ").split() + shown
        if shown == help_text:
            begin = above
            break
    return "".join(lines[:begin] + lines[end:])


def _continues(line: str, indent: int) -> bool:
    """Return whether a line belongs to the value of a key that is indented so far."""
    rest = line.lstrip(" ")
    depth = len(line) - len(rest)
    return bool(rest.strip()) and (depth > indent or (depth == indent and rest.startswith("- ")))


def _text(document: Any) -> str:
    out = StringIO()
    _yaml().dump(document, out)
    return out.getvalue()


def _check_name(section: str, field: str) -> None:
    """Check that there is such a setting.

    Raises:
        ConfigError: There is none; the message names the nearest.
    """
    source = Source("command line", "--unset")
    check_field(section, field, field_types(Vocabulary({}).section(section, source)), source)


def _value(change: SettingChange) -> tuple[Any, list[str]]:
    """Return the value of a change, checked, as a file holds it, and notes of it."""
    source = Source("command line", "--set")
    types = field_types(Vocabulary({}).section(change.section, source))
    check_field(change.section, change.field, types, source)
    value = converted(change.section, change.field, types[change.field], Entry(change.text, source))
    return plain(value), check_plugins(_spec(change.section, change.field), value, source)


def _help(section: str, field: str) -> str:
    return _spec(section, field).help


def _spec(section: str, field: str) -> FieldSpec:
    kind = sections(only={section})[section]
    return next(spec for spec in specs(kind, section) if spec.name == field)


def _check(path: Path, text: str) -> None:
    """Check the new text as a file, before the old one is replaced."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        probe = Path(folder) / path.name
        probe.write_text(text, encoding="utf-8")
        problems = review_file(probe).problems
    if problems:
        shown = "; ".join(problems).replace(str(probe), str(path))
        raise ConfigError(f"{shown}; {path} is left as it is")


def _document(text: str) -> Any:
    return _yaml().load(text)


def _yaml() -> Any:
    try:
        from ruamel.yaml import YAML
    except ImportError as error:
        raise LaunchError(
            "a file is changed with its comments kept by ruamel.yaml: pip install 'drivetrain-launcher[wizard]', or "
            "change the file in an editor"
        ) from error
    yaml = YAML()
    yaml.width = 10**6
    yaml.preserve_quotes = True
    return yaml
