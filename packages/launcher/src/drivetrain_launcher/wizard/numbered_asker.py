"""Ask by numbered lines, for a terminal that cannot move its cursor, or without the library that does."""

import sys
from dataclasses import MISSING

from drivetrain_launcher.wizard.answer_check import shown_answer
from drivetrain_launcher.wizard.questionnaire import Choice, Question


class NumberedAsker:
    """An asker that prints numbered answers and reads a line."""

    def choose(self, text: str, why: str, choices: tuple[Choice, ...]) -> Choice:
        """Return the choice of the user; Enter takes the first."""
        sys.stdout.write(f"\n{text}\n  Recommended: {choices[0].label}: {why}.\n")
        for number, choice in enumerate(choices, start=1):
            about = f": {choice.about}" if choice.about else ""
            sys.stdout.write(f"  {number}) {choice.label}{about}\n")
        while True:
            typed = _read(f"Number of the answer, from 1 to {len(choices)} [1]: ")
            if not typed:
                return choices[0]
            if typed.isdecimal() and 1 <= int(typed) <= len(choices):
                return choices[int(typed) - 1]
            self.refuse(f"{typed!r}: say a number from 1 to {len(choices)}")

    def enter(self, question: Question) -> str:
        """Return the text that the user typed; Enter takes the recommended answer."""
        has_answer = question.recommended is not MISSING
        shown = shown_answer(question, question.recommended)
        why = f"  Recommended: {shown}: {question.why}.\n" if has_answer else f"  An answer is {shown}.\n"
        sys.stdout.write(f"\n{question.text}\n{why}")
        return _read(f"Answer [{shown}]: " if has_answer else "Answer: ")

    def refuse(self, message: str) -> None:
        """Show why an answer was refused."""
        sys.stdout.write(f"  {message}\n")


def _read(prompt: str) -> str:
    """Return a line from the terminal; its end (Ctrl-D) stops the questions, as Ctrl-C does."""
    sys.stdout.write(prompt)
    sys.stdout.flush()
    line = sys.stdin.readline()
    if not line:
        raise KeyboardInterrupt
    return line.strip()
