"""Checks of a job's words that clusters with scripts share."""

import re

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.protocol import JobRequest

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_words(cluster: str, request: JobRequest) -> None:
    """Check that there is a command, and that it and the variables can be given to a process.

    Raises:
        ClusterError: The command is empty, a word holds a null character, or the name of a variable is none.
    """
    if not request.command:
        raise ClusterError(
            f"{cluster}: the job has no command: say what each node runs, such as drivetrain launch train.py"
        )
    if any("\0" in word for word in (*request.command, *request.environment.values())):
        raise ClusterError(
            f"{cluster}: a word of the command or a variable holds a null character, which no command can"
        )
    for name in request.environment:
        if not _VARIABLE.fullmatch(name):
            raise ClusterError(
                f"{cluster}: {name!r} is no name of a variable: letters, digits and _ are allowed"
            )
