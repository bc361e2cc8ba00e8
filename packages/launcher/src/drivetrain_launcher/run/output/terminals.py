"""The outputs of this process that are terminals, with colours and movements of the cursor."""

import os
from collections.abc import Mapping

from drivetrain_clusters.mpi.placement import OPEN_MPI, find_starter
from drivetrain_messages.console import said_colours

# Each has a contrast of at least 3.9 with black and with white, so that it can be read on a dark and on a light
# background. Red is left to errors. Numbers of the 256 colours that terminals share: blue, orange, green, purple,
# brown-red, violet.
COLOURS = (31, 130, 28, 133, 131, 98)


def output_terminals(environment: Mapping[str, str]) -> tuple[bool, bool]:
    """Return whether stdout and stderr are terminals with a movable cursor.

    Args:
        environment: The environment variables of this process.
    """
    # Open MPI gives every task a terminal, and merges their lines into its own output, which may be a file.
    if environment.get("TERM") in (None, "", "dumb") or find_starter(environment) is OPEN_MPI:
        return False, False
    return os.isatty(1), os.isatty(2)


def coloured_outputs(environment: Mapping[str, str]) -> tuple[bool, bool]:
    """Return whether to colour stdout and stderr: a non-empty NO_COLOR decides, then FORCE_COLOR."""
    said = said_colours(environment)
    return output_terminals(environment) if said is None else (said, said)


def are_one_output() -> bool:
    """Return whether stdout and stderr are the same terminal, pipe or file."""
    try:
        first, second = os.fstat(1), os.fstat(2)
    except OSError:  # one of them is closed
        return False
    return (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)


def prefix_of(rank: int, *, host: str = "", is_coloured: bool = False) -> str:
    """Return the prefix of each line of a rank, with the host if the run has several hosts."""
    text = f"[rank {rank}{f' {host}' if host else ''}]"
    return f"\x1b[38;5;{COLOURS[rank % len(COLOURS)]}m{text}\x1b[0m " if is_coloured else f"{text} "
