"""Open the asker of the questions, on a terminal that can show it."""

import sys

from drivetrain_config import environ
from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.wizard.interview import Asker

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
