"""A line on the terminal, marked to stand apart from the script's output; and who decides on colours there."""

import sys
from collections.abc import Mapping


def say(text: str) -> None:
    """Write a line to stderr that begins with "drivetrain: "."""
    sys.stderr.write(f"drivetrain: {text}\n")
    sys.stderr.flush()


def said_colours(environment: Mapping[str, str]) -> bool | None:
    """Return whether to colour, by a non-empty NO_COLOR, then FORCE_COLOR; None if neither is set."""
    if environment.get("NO_COLOR"):
        return False
    forced = environment.get("FORCE_COLOR")
    return forced != "0" if forced else None
