"""A line on the terminal, marked to stand apart from the script's output."""

import sys


def say(text: str) -> None:
    """Write a line to stderr that begins with "drivetrain: "."""
    sys.stderr.write(f"drivetrain: {text}\n")
    sys.stderr.flush()
