"""Choose how this terminal is asked: by arrow keys, or by numbered lines."""

import sys

from drivetrain_config import environ
from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.wizard.interview import Asker
from drivetrain_messages import say


def choose_asker() -> Asker:
    """Return the asker that suits this terminal.

    Raises:
        LaunchError: There is no terminal to ask on.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise LaunchError(
            "there is no terminal to ask on: say --yes to take every recommended answer, with flags for those that "
            "differ, or --from FILE"
        )
    if environ.read("TERM") not in (None, "", "dumb"):
        try:
            from drivetrain_launcher.wizard.arrow_asker import ArrowAsker
        except ModuleNotFoundError as error:
            if error.name != "questionary":
                raise
            say("pip install 'drivetrain-launcher[wizard]' to answer with the arrow keys")
        else:
            return ArrowAsker()
    from drivetrain_launcher.wizard.numbered_asker import NumberedAsker

    return NumberedAsker()
