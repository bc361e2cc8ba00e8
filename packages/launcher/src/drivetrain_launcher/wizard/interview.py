"""Ask the questions of a questionnaire until none is left."""

import sys
from collections.abc import Mapping
from dataclasses import MISSING
from typing import Any, Protocol

from drivetrain_config import environ
from drivetrain_launcher.errors import LaunchError, UsageError
from drivetrain_launcher.wizard.answer_check import check_answer, read_answer
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
        ...


def ask_all(
    asker: Asker,
    sections: Mapping[str, type[Any]],
    facts: Mapping[str, Any],
    answers: Mapping[Key, GivenAnswer],
    earlier: Mapping[Key, GivenAnswer],
) -> dict[Key, GivenAnswer]:
    """Ask every open question, then offer the sections that were not asked about.

    Args:
        asker: The terminal that asks.
        sections: The dataclasses of the sections, by name.
        facts: The facts of the machine.
        answers: The answers that are given already, by flags.
        earlier: The settings of an earlier file, which become recommendations.
    """
    found = dict(answers)
    opened: list[str] = []
    while True:
        plan = plan_questions(sections, facts, found, earlier=earlier, opened=opened)
        if plan.questions:
            question = plan.questions[0]
            found[question.key] = _ask(asker, question, sections[question.section], found)
        elif (section := _offer(asker, plan.further)) is not None:
            opened.append(section)
        else:
            return {**{key: answer for key, answer in earlier.items() if key not in found}, **found}


def take_recommended(
    sections: Mapping[str, type[Any]],
    facts: Mapping[str, Any],
    answers: Mapping[Key, GivenAnswer],
    earlier: Mapping[Key, GivenAnswer],
) -> dict[Key, GivenAnswer]:
    """Answer every open question with its recommendation, and ask nothing.

    Raises:
        LaunchError: A question has no recommended answer; the message says how to give one.
    """
    found = dict(answers)
    while questions := plan_questions(sections, facts, found, earlier=earlier).questions:
        question = questions[0]
        if question.recommended is MISSING:
            flag = f"--{question.section}-{question.field}".replace("_", "-")
            raise LaunchError(
                f"{question.section}.{question.field} has no recommended answer: say {flag} VALUE, or run drivetrain "
                "config in a terminal without --yes"
            )
        check_answer(sections[question.section], question, question.recommended, found)
        found[question.key] = GivenAnswer(value=question.recommended, why=question.why)
    return {**{key: answer for key, answer in earlier.items() if key not in found}, **found}


def _ask(
    asker: Asker, question: Question, section: type[Any], answers: Mapping[Key, GivenAnswer]
) -> GivenAnswer:
    """Ask one question until its answer is valid."""
    while True:
        try:
            if question.choices:
                value = asker.choose(question.text, question.why, question.choices).value
            else:
                value = read_answer(question, asker.enter(question))
            check_answer(section, question, value, answers)
        except UsageError as error:
            asker.refuse(str(error))
            continue
        is_recommended = question.recommended is not MISSING and value == question.recommended
        return GivenAnswer(value=value, why=question.why if is_recommended else _CHOSEN)


def _offer(asker: Asker, further: Mapping[str, str]) -> str | None:
    """Offer the sections that were not asked about; return the one to go through."""
    if not further:
        return None
    done = Choice(value=None, label="no, write the file")
    sections = (Choice(value=name, label=name, about=text) for name, text in further.items())
    return asker.choose(
        "Set anything else?", "the defaults of what is left suit most runs", (done, *sections)
    ).value


_WITHOUT_QUESTIONS = (
    "say --yes to take every recommended answer, with flags for those that differ, or --from FILE"
)


def choose_asker() -> Asker:
    """Return the asker for this terminal.

    Raises:
        LaunchError: There is no terminal to ask on, it cannot move its cursor, or questionary is missing.
    """
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
