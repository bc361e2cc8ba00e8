"""What the launcher says to the person at the terminal, apart from what the script prints."""

import sys


def say(text: str) -> None:
    """Write a line to stderr, marked as the launcher's."""
    sys.stderr.write(f"drivetrain: {text}\n")
    sys.stderr.flush()
