"""The outputs of this process that are terminals, with colours and movements of the cursor."""

import os
from collections.abc import Mapping

from drivetrain_clusters.mpi.placement import OPEN_MPI, find_starter
from drivetrain_launcher.run.output.palette import is_coloured


def output_terminals(environment: Mapping[str, str]) -> tuple[bool, bool]:
    """Return whether stdout and stderr are terminals that move their cursor when told.

    Args:
        environment: The environment variables of this process.
    """
    # Open MPI gives every task a terminal, and merges their lines into its own output, which may be a file.
    if environment.get("TERM") in (None, "", "dumb") or find_starter(environment) is OPEN_MPI:
        return False, False
    return os.isatty(1), os.isatty(2)


def coloured_outputs(environment: Mapping[str, str]) -> tuple[bool, bool]:
    """Return whether to colour stdout and stderr: NO_COLOR and FORCE_COLOR decide if they are set."""
    stdout, stderr = (
        is_coloured(
            no_color=environment.get("NO_COLOR"), force_color=environment.get("FORCE_COLOR"), is_terminal=each
        )
        for each in output_terminals(environment)
    )
    return stdout, stderr


def are_one_output() -> bool:
    """Return whether stdout and stderr are the same terminal, pipe or file."""
    try:
        first, second = os.fstat(1), os.fstat(2)
    except OSError:  # one of them is closed
        return False
    return (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)
