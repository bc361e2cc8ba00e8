"""Write settings as commented YAML, each with its help and the reason for its value."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING
from pathlib import Path
from shlex import quote
from textwrap import wrap
from typing import Any

from drivetrain_config.settings.schema import FieldSpec, flag_name, specs
from drivetrain_config.values.kinds import plain
from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.wizard.questionnaire import GivenAnswer, Key, in_order

_WIDTH = 96
# Where the reader of the file stands, who may never have seen the command.
_FOUND = (
    "drivetrain launch finds this file in the working folder, in a folder above it within the project, or as "
    "~/.config/drivetrain/config.yaml. --config FILE takes another file, --config none takes none; flags and "
    "variables win over it."
)


def settings_text(
    answers: Mapping[Key, GivenAnswer], sections: Mapping[str, type[Any]], *, heading: Sequence[str] = ()
) -> str:
    """Return the text of a settings file.

    A value of None, which YAML could only write as null, becomes a comment with the setting's name.

    Args:
        answers: The value of each setting, and the reason for it.
        sections: The dataclasses of the sections, by name.
        heading: The paragraphs at the top of the file.
    """
    lines = [line for paragraph in (*heading, _FOUND) for line in _comment(paragraph, "")]
    for name in in_order(sections):
        given = [spec for spec in specs(sections[name], name) if (name, spec.name) in answers]
        if not given:
            continue
        is_empty = all(answers[name, spec.name].value is None for spec in given)
        lines += ["", f"{name}: {{}}" if is_empty else f"{name}:"]
        for spec in given:
            lines += _setting(spec, answers[name, spec.name])
    return "\n".join([*lines, ""])


def launch_line(
    answers: Mapping[Key, GivenAnswer],
    sections: Mapping[str, type[Any]],
    *,
    command: str = "drivetrain launch",
) -> str:
    """Return the launch that gives the same settings by flags, as words for a shell.

    Defaults are left out, and so are secrets, which have no flag.

    Args:
        answers: The settings with their reasons.
        sections: The dataclasses of the sections, by name.
        command: The command that launches.
    """
    words = command.split()
    for name in in_order(sections):
        for spec in specs(sections[name], name):
            answer = answers.get((name, spec.name))
            if answer is None or spec.secret or answer.value == spec.default:
                continue
            words += _flag(spec, answer.value)
    return " ".join(map(quote, [*words, "train.py"]))


def yaml_value(value: Any) -> str:
    """Return a value as YAML in one line, which every version of YAML reads the same way."""
    import yaml

    text = yaml.safe_dump(plain(value), default_flow_style=True, width=10**6, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def _flag(spec: FieldSpec, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag_name(spec.section, spec.name, negated=not value)]
    written = plain(value)
    if isinstance(written, list):
        text = ",".join(map(str, written))
    elif isinstance(written, dict):
        import json

        text = json.dumps(written)
    else:
        text = "none" if written is None else str(written)
    return [flag_name(spec.section, spec.name), text]


def _setting(spec: FieldSpec, answer: GivenAnswer) -> list[str]:
    lines = [line for text in (spec.help, f"Why: {answer.why}.") for line in _comment(text, "  ") if text]
    if answer.value is None:
        example = "" if spec.default in (None, MISSING) else f" {yaml_value(spec.default)}"
        return [*lines, f"  # {spec.name}:{example}"]
    return [*lines, f"  {spec.name}: {yaml_value(answer.value)}"]


def _comment(text: str, indent: str) -> list[str]:
    return wrap(
        text,
        width=_WIDTH,
        initial_indent=f"{indent}# ",
        subsequent_indent=f"{indent}# ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def backup_of(path: Path) -> Path:
    """Return the path to which an earlier file is moved."""
    return path.with_name(f"{path.name}.bak")


def write_settings(path: Path, text: str) -> Path | None:
    """Write a settings file.

    Returns:
        The path of the copy of the file that was there; None if there was none.

    Raises:
        LaunchError: The file cannot be written.
    """
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
