"""Ask the questions of a questionnaire until none is left."""

import sys
from collections.abc import Mapping
from dataclasses import MISSING
from typing import Any, Protocol

from drivetrain_config import environ
from drivetrain_config.settings.schema import specs
from drivetrain_config.values.conversion import ConversionError, convert
from drivetrain_launcher.errors import LaunchError, UsageError
from drivetrain_launcher.wizard.questionnaire import Choice, GivenAnswer, Key, Question, plan_questions

_CHOSEN = "chosen by you"


class Asker(Protocol):
    """A terminal that asks questions; Ctrl-C raises KeyboardInterrupt from each method."""

    def choose(self, text: str, why: str, choices: tuple[Choice, ...]) -> Choice:
        """Return the choice of the user; the first one is recommended."""
        ...

    def enter(self, question: Question) -> str:
        """Return the text that the user typed."""
        ...

    def refuse(self, message: str) -> None:
        """Show why an answer was refused, before the question is asked again."""


def ask_all(
    asker: Asker | None,
    sections: Mapping[str, type[Any]],
    facts: Mapping[str, Any],
    answers: Mapping[Key, GivenAnswer],
    earlier: Mapping[Key, GivenAnswer],
) -> dict[Key, GivenAnswer]:
    """Ask every open question, then offer the sections that were not asked about.

    Without an asker, take each recommended answer; raise LaunchError if it is missing or the section refuses it.
    """
    found = dict(answers)
    opened: list[str] = []
    while True:
        plan = plan_questions(sections, facts, found, earlier=earlier, opened=opened)
        if plan.questions:
            question = plan.questions[0]
            found[question.key] = _answer(asker, question, sections[question.section], found)
            continue
        if asker is None or not plan.further:
            return {**earlier, **found}
        done = Choice(value=None, label="no, write the file")
        more = (Choice(value=name, label=name, about=text) for name, text in plan.further.items())
        section = asker.choose(
            "Set anything else?", "the defaults of what is left suit most runs", (done, *more)
        ).value
        if section is None:
            return {**earlier, **found}
        opened.append(section)


def _answer(
    asker: Asker | None, question: Question, section: type[Any], answers: Mapping[Key, GivenAnswer]
) -> GivenAnswer:
    """Ask one question until its answer is valid."""
    if asker is None and question.recommended is MISSING:
        flag = f"--{question.section}-{question.field}".replace("_", "-")
        raise LaunchError(
            f"{question.section}.{question.field} has no recommended answer: say {flag} VALUE, or run drivetrain "
            "config in a terminal without --yes"
        )
    while True:
        value = question.recommended
        try:
            if asker is not None and question.choices:
                value = asker.choose(question.text, question.why, question.choices).value
            elif asker is not None:
                typed = asker.enter(question).strip()
                if typed or value is MISSING:
                    try:
                        value = convert(typed, question.kind, text=True)
                    except ConversionError as error:
                        # A file says null where a user types none.
                        why = str(error).replace(" or null", " or none")
                        raise UsageError(f"{typed!r}: {why}") from error
            _check(section, question, value, answers)
        except UsageError as error:
            if asker is None:
                raise
            asker.refuse(str(error))
        else:
            is_recommended = question.recommended is not MISSING and value == question.recommended
            return GivenAnswer(value=value, why=question.why if is_recommended else _CHOSEN)


def _check(section: type[Any], question: Question, value: Any, answers: Mapping[Key, GivenAnswer]) -> None:
    """Check a value as the launch will, together with the answers to the other questions of its section."""
    given = {field: answer.value for (name, field), answer in answers.items() if name == question.section}
    given[question.field] = value
    known = {spec.name: spec for spec in specs(section, question.section)}
    if any(spec.default is MISSING and name not in given for name, spec in known.items()):
        return  # a later question asks for the rest
    try:
        section(**{name: convert(each, known[name].kind) for name, each in given.items()})
    except ConversionError as error:
        raise UsageError(f"{value!r}: {error}") from error
    except ValueError as error:
        raise UsageError(str(error)) from error


_WITHOUT_QUESTIONS = (
    "say --yes to take every recommended answer, with flags for those that differ, or --from FILE"
)


def choose_asker() -> Asker:
    """Return the asker for this terminal; a LaunchError if it cannot move its cursor, or questionary is missing."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise LaunchError(f"there is no terminal to ask on: {_WITHOUT_QUESTIONS}")
    if (term := environ.read("TERM")) in (None, "", "dumb"):
        raise LaunchError(
            f"TERM={term or ''}: the questions need a terminal that can move its cursor; set TERM to the terminal's "
            f"kind, such as xterm-256color, or {_WITHOUT_QUESTIONS}"
        )
    try:
        from drivetrain_launcher.wizard.arrow_asker import ArrowAsker
    except ModuleNotFoundError as error:
        if error.name != "questionary":
            raise
        raise LaunchError(
            f"the questions need questionary: pip install 'drivetrain-launcher[wizard]', or {_WITHOUT_QUESTIONS}"
        ) from error
    return ArrowAsker()
