"""Settings of a file: read as answers, and written as commented YAML with the reason for each value."""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING
from pathlib import Path
from shlex import quote
from textwrap import TextWrapper
from typing import Any

from drivetrain_config import Source
from drivetrain_config.files.settings_file import Contents
from drivetrain_config.settings.schema import flag_name, specs
from drivetrain_config.settings.vocabulary import Vocabulary, check_field, converted
from drivetrain_config.source import Entry
from drivetrain_config.values.kinds import field_types, plain
from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.wizard.questionnaire import GivenAnswer, Key, in_order

_WIDTH = 96
# Where the reader of the file stands, who may never have seen the command.
_FOUND = (
    "drivetrain launch finds this file in the working folder, in a folder above it within the project, or as "
    "~/.config/drivetrain/config.yaml. --config FILE takes another file, --config none takes none; flags and "
    "variables win over it."
)


def answers_of(contents: Contents, why: str) -> dict[Key, GivenAnswer]:
    """Return the settings of a file as answers, whose reason is `why` and their place in the file."""
    vocabulary = Vocabulary({})
    found: dict[Key, GivenAnswer] = {}
    for section, values in contents.data.items():
        types = field_types(vocabulary.section(section, Source("file", contents.where(section))))
        for name, value in (values or {}).items():
            source = Source("file", contents.where(section, name))
            check_field(section, name, types, source)
            setting = converted(section, name, types[name], Entry(value, source))
            found[section, name] = GivenAnswer(value=setting, why=f"{why} {source}")
    return found


def settings_text(
    answers: Mapping[Key, GivenAnswer], sections: Mapping[str, type[Any]], *, heading: Sequence[str] = ()
) -> str:
    """Return the text of a settings file, with the paragraphs of `heading` at its top.

    A value of None, which YAML could only write as null, becomes a comment with the setting's name.
    """
    lines = _comments([*heading, _FOUND], "")
    for name in in_order(sections):
        given = [spec for spec in specs(sections[name], name) if (name, spec.name) in answers]
        if not given:
            continue
        is_empty = all(answers[name, spec.name].value is None for spec in given)
        lines += ["", f"{name}: {{}}" if is_empty else f"{name}:"]
        for spec in given:
            answer = answers[name, spec.name]
            lines += _comments([spec.help, f"Why: {answer.why}."], "  ")
            if answer.value is not None:
                lines.append(f"  {spec.name}: {yaml_value(answer.value)}")
            else:
                example = "" if spec.default in (None, MISSING) else f" {yaml_value(spec.default)}"
                lines.append(f"  # {spec.name}:{example}")
    return "\n".join([*lines, ""])


def launch_line(
    answers: Mapping[Key, GivenAnswer], sections: Mapping[str, type[Any]], *, command: str
) -> str:
    """Return the launch that gives the same settings by flags, as words for a shell.

    Defaults are left out, and so are secrets, which have no flag.
    """
    words = command.split()
    for name in in_order(sections):
        for spec in specs(sections[name], name):
            answer = answers.get((name, spec.name))
            if answer is None or spec.secret or answer.value == spec.default:
                continue
            if isinstance(answer.value, bool):
                words.append(flag_name(name, spec.name, negated=not answer.value))
            else:
                words += [flag_name(name, spec.name), as_typed(answer.value)]
    return " ".join(map(quote, [*words, "train.py"]))


def as_typed(value: Any) -> str:
    """Return a value as a user types it, after a flag or for an answer."""
    written = plain(value)
    if isinstance(written, list):
        return ",".join(map(str, written))
    if isinstance(written, dict):
        import json

        return json.dumps(written)
    if isinstance(written, bool):
        return str(written).lower()
    return "none" if written is None else str(written)


def yaml_value(value: Any) -> str:
    """Return a value as YAML in one line, which every version of YAML reads the same way."""
    import yaml

    text = yaml.safe_dump(plain(value), default_flow_style=True, width=10**6, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def _comments(texts: Iterable[str], indent: str) -> list[str]:
    """Return paragraphs as comments."""
    begin = f"{indent}# "
    wrapper = TextWrapper(
        width=_WIDTH,
        initial_indent=begin,
        subsequent_indent=begin,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line for text in texts for line in wrapper.wrap(text)]


def backup_of(path: Path) -> Path:
    """Return the path to which an earlier file is moved."""
    return path.with_name(f"{path.name}.bak")


def write_settings(path: Path, text: str) -> Path | None:
    """Write a settings file, and return the path of the earlier file's copy; None without an earlier file."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = backup_of(path) if path.exists() else None
        if kept is not None:
            kept.write_bytes(path.read_bytes())
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        with suppress(OSError):  # it may not even be there
            beside.unlink()
        raise LaunchError(
            f"{path}: cannot be written: {error.strerror}; say --output FILE in a folder that you may write to"
        ) from error
    return kept
