"""Ask with arrow keys, by the library questionary."""

from dataclasses import MISSING
from shutil import get_terminal_size
from textwrap import fill, shorten

import questionary

from drivetrain_launcher.wizard.answer_check import shown_answer
from drivetrain_launcher.wizard.questionnaire import Choice, Question

_STYLE = questionary.Style(
    [
        ("qmark", "fg:ansigreen bold"),
        ("question", "bold"),
        ("pointer", "fg:ansicyan bold"),
        ("highlighted", "fg:ansicyan bold"),
        ("instruction", "fg:ansibrightblack"),
    ]
)


class ArrowAsker:
    """An asker whose answers are chosen with the arrow keys; an answered question shrinks to a line."""

    def choose(self, text: str, why: str, choices: tuple[Choice, ...]) -> Choice:
        """Return the choice of the user; Enter takes the first."""
        width = max(len(choice.label) for choice in choices)
        shown = [
            questionary.Choice(title=_title(choice, width), value=str(index))
            for index, choice in enumerate(choices)
        ]
        reason = _reason(choices[0].label, why)
        chosen = questionary.select(
            text,
            choices=shown,
            style=_STYLE,
            instruction=f"(arrow keys, then Enter)\n{reason}",
            erase_when_done=True,
        ).unsafe_ask()
        found = choices[int(chosen)]
        _say_answer(text, found.label)
        return found

    def enter(self, question: Question) -> str:
        """Return the text that the user typed; Enter takes the recommended answer."""
        shown = shown_answer(question, question.recommended)
        has_answer = question.recommended is not MISSING
        reason = f"{_reason(shown, question.why)}\n" if has_answer else ""
        hint = "(Enter takes it)" if has_answer else f"({shown})"
        typed: str = questionary.text(
            question.text, style=_STYLE, instruction=f"\n{reason}  {hint} ", erase_when_done=True
        ).unsafe_ask()
        _say_answer(question.text, typed.strip() or shown)
        return typed

    def refuse(self, message: str) -> None:
        """Show why an answer was refused."""
        _say(f"  {message}", "fg:ansired")


def _title(choice: Choice, width: int) -> str:
    """Return the line of a choice, cut to the terminal's width: a wrapped one would look like two."""
    columns = max(40, get_terminal_size().columns - 6)
    line = f"{choice.label:<{width}}  {choice.about}".rstrip()
    return (
        line
        if len(line) <= columns
        else f"{choice.label:<{width}}  "
        + shorten(choice.about, max(10, columns - width - 2), placeholder=" ...")
    )


def _reason(label: str, why: str) -> str:
    columns = max(40, get_terminal_size().columns - 2)
    return fill(f"Recommended: {label}: {why}.", columns, initial_indent="  ", subsequent_indent="  ")


def _say_answer(text: str, answer: str) -> None:
    questionary.print(text, style="bold", end=" ")
    _say(answer, "fg:ansicyan")


def _say(text: str, style: str) -> None:
    questionary.print(text, style=style)
