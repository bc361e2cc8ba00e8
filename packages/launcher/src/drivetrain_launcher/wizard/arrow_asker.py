"""Ask with arrow keys, by the library questionary."""

from dataclasses import MISSING
from shutil import get_terminal_size
from textwrap import fill, shorten

import questionary

from drivetrain_config.values.kinds import describe
from drivetrain_launcher.wizard.questionnaire import Choice, Question
from drivetrain_launcher.wizard.settings_text import as_typed

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
        # A line that is wrapped would look like two choices.
        columns = max(10, max(40, get_terminal_size().columns - 6) - width - 2)
        shown = [
            questionary.Choice(
                title=f"{choice.label:<{width}}  {shorten(choice.about, columns, placeholder=' ...')}".rstrip(),
                value=str(index),
            )
            for index, choice in enumerate(choices)
        ]
        chosen = questionary.select(
            text,
            choices=shown,
            style=_STYLE,
            instruction=f"(arrow keys, then Enter)\n{_reason(choices[0].label, why)}",
            erase_when_done=True,
        ).unsafe_ask()
        found = choices[int(chosen)]
        _show_answer(text, found.label)
        return found

    def enter(self, question: Question) -> str:
        """Return the text that the user typed; Enter takes the recommended answer."""
        if question.recommended is MISSING:
            shown = describe(question.kind)
            hint = f"  ({shown})"
        else:
            shown = as_typed(question.recommended) or "none"
            hint = f"{_reason(shown, question.why)}\n  (Enter takes it)"
        typed: str = questionary.text(
            question.text, style=_STYLE, instruction=f"\n{hint} ", erase_when_done=True
        ).unsafe_ask()
        _show_answer(question.text, typed.strip() or shown)
        return typed

    def refuse(self, message: str) -> None:
        """Show why an answer was refused."""
        questionary.print(f"  {message}", style="fg:ansired")


def _reason(label: str, why: str) -> str:
    columns = max(40, get_terminal_size().columns - 2)
    return fill(f"Recommended: {label}: {why}.", columns, initial_indent="  ", subsequent_indent="  ")


def _show_answer(text: str, answer: str) -> None:
    questionary.print(text, style="bold", end=" ")
    questionary.print(answer, style="fg:ansicyan")
