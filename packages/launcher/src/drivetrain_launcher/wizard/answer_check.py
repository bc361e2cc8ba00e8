"""Check an answer as the launch will: its type, then its section as a whole, with the answers before it."""

from collections.abc import Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from drivetrain_config.settings.schema import specs
from drivetrain_config.values.conversion import ConversionError, convert
from drivetrain_config.values.kinds import describe
from drivetrain_launcher.errors import UsageError
from drivetrain_launcher.wizard.questionnaire import GivenAnswer, Key, Question


def read_answer(question: Question, text: str) -> Any:
    """Return the value of a typed answer; an empty one takes the recommended value.

    Raises:
        UsageError: The text is not a value of the field; the message says what is allowed.
    """
    typed = text.strip()
    if not typed and question.recommended is not MISSING:
        return question.recommended
    try:
        return convert(typed, question.kind, text=True)
    except ConversionError as error:
        # A file says null where a user types none.
        raise UsageError(f"{typed!r}: {str(error).replace(' or null', ' or none')}") from error


def check_answer(kind: type[Any], question: Question, value: Any, answers: Mapping[Key, GivenAnswer]) -> None:
    """Check a value together with the answers to the other questions of its section.

    Raises:
        UsageError: The section refuses the value; the message is its own.
    """
    given = {
        field: answer.value for (section, field), answer in answers.items() if section == question.section
    }
    given[question.field] = value
    needed = {spec.name for spec in specs(kind, question.section) if spec.default is MISSING}
    if not needed <= given.keys():
        return  # a later question asks for the rest
    types = {spec.name: spec.kind for spec in specs(kind, question.section)}
    try:
        kind(**{name: convert(each, types[name]) for name, each in given.items()})
    except ConversionError as error:
        raise UsageError(f"{value!r}: {error}") from error
    except ValueError as error:
        raise UsageError(str(error)) from error


def shown_answer(question: Question, value: Any) -> str:
    """Return a value as the user may type it."""
    if value is MISSING:
        return f"{describe(question.kind)}"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return ",".join(map(str, value)) or "none"
    return str(value) if not isinstance(value, Path) else value.as_posix()
