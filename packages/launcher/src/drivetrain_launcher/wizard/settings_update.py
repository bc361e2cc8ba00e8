"""Change settings in the text of a file, with its comments and its order kept, by the library ruamel.yaml."""

from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from drivetrain_config import ConfigError, Source, sections
from drivetrain_config.files.settings_file import read_file
from drivetrain_config.settings.file_review import review_file
from drivetrain_config.settings.plugin_names import check_plugins
from drivetrain_config.settings.schema import FieldSpec, specs
from drivetrain_config.settings.vocabulary import Vocabulary, check_field, converted
from drivetrain_config.source import Entry
from drivetrain_config.values.kinds import plain
from drivetrain_launcher.errors import LaunchError, UsageError
from drivetrain_launcher.wizard.settings_text import answers_of, settings_text, yaml_value

_SET, _UNSET = Source("command line", "--set"), Source("command line", "--unset")


def updated_text(path: Path, changes: Sequence[str], removals: Sequence[str]) -> tuple[str, list[str]]:
    """Return the new text of a file, and a line for each change; no lines if nothing changes.

    A change is `section.field=value`, a removal `section.field`. A ConfigError says that a setting is unknown or
    wrong, or that the file would be invalid.
    """
    if path.suffix not in (".yaml", ".yml"):
        raise LaunchError(f"{path}: only a YAML file is changed here; change it by hand")
    contents = read_file(path)
    text, lines = path.read_text(encoding="utf-8"), list[str]()
    # The text spells other sections than are read from it: it is in Accelerate's form.
    if set(contents.data) != set(_yaml().load(text) or {}):
        heading = f"The settings of a drivetrain run, converted from {path}."
        text = settings_text(answers_of(contents, "as in"), sections(), heading=[heading])
        lines = [f"{path}: was Accelerate's, and is drivetrain's now", *contents.notices]
    if changes:
        text, changed = _apply_changes(text, changes)
        lines += changed
    for name in removals:
        section, field, _ = _parse(f"{name}=")
        spec = _find_spec(section, field, _UNSET)
        values = (_yaml().load(text) or {}).get(section) or {}
        if field in values:
            lines.append(f"{section}.{field}: {yaml_value(plain(values[field]))} -> unset")
            text = _remove_setting(text, spec)
    with TemporaryDirectory() as folder:  # the file itself is replaced only if the new text is valid
        probe = Path(folder) / path.name
        probe.write_text(text, encoding="utf-8")
        if problems := review_file(probe).problems:
            shown = "; ".join(problems).replace(str(probe), str(path))
            raise ConfigError(f"{shown}; {path} is left as it is")
    return text, lines


def _parse(change: str) -> tuple[str, str, str]:
    """Return section, field and value of a change, `section.field=value`."""
    name, equals, value = change.partition("=")
    section, dot, field = name.strip().partition(".")
    if not (equals and dot and section and field):
        raise UsageError(f"{change!r}: say SECTION.FIELD=VALUE, such as run.mixed_precision=bf16")
    return section, field, value.strip()


def _find_spec(section: str, field: str, source: Source) -> FieldSpec:
    """Return a field by its names; the ConfigError for an unknown field names the nearest."""
    known = {spec.name: spec for spec in specs(Vocabulary({}).section(section, source), section)}
    check_field(section, field, known, source)
    return known[field]


def _apply_changes(text: str, changes: Sequence[str]) -> tuple[str, list[str]]:
    """Return the text of a file with settings changed, and a line for each change."""
    document = _yaml().load(text)
    document = _yaml().map() if document is None else document
    lines: list[str] = []
    for change in changes:
        section, field, typed = _parse(change)
        spec = _find_spec(section, field, _SET)
        setting = converted(section, field, spec.kind, Entry(typed, _SET))
        notes = check_plugins(spec, setting, _SET)
        if document.get(section) is None:
            document[section] = _yaml().map()
        values = document[section]
        is_new = field not in values
        before = "unset" if is_new else yaml_value(plain(values[field]))
        value = plain(setting)
        after = yaml_value(value)
        if before == after:
            continue
        values[field] = value
        if is_new:
            values.yaml_set_comment_before_after_key(field, before=spec.help, indent=2)
        lines += [f"{section}.{field}: {before} -> {after}", *notes]
    return _dump_document(document), lines


def _remove_setting(text: str, spec: FieldSpec) -> str:
    """Return the text of a file without a setting and its help; all other comments stay where they are.

    The library keeps a comment with the key before it, so that removing a key from its document would remove
    the next key's comment, and leave the removed key's own.
    """
    document = _yaml().load(text)
    values = document[spec.section]
    if values.fa.flow_style() or len(values) == 1:
        del values[spec.name]
        return _dump_document(document)
    lines = text.splitlines(keepends=True)
    begin, indent = values.lc.key(spec.name)
    end = begin + 1
    for line in lines[end:]:
        rest = line.lstrip(" ")
        depth = len(line) - len(rest)
        if not rest.strip() or depth < indent or (depth == indent and not rest.startswith("- ")):
            break  # behind the value
        end += 1
    help_words, shown = spec.help.split(), list[str]()
    for above in range(begin - 1, -1, -1):
        line = lines[above].strip()
        if not line.startswith("#"):
            break
        shown = line.lstrip("# ").split() + shown
        if shown == help_words:
            begin = above
            break
    return "".join(lines[:begin] + lines[end:])


def _dump_document(document: Any) -> str:
    out = StringIO()
    _yaml().dump(document, out)
    return out.getvalue()


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
