"""Name a process such that another one on its host can tell whether it still runs."""

import os
from contextlib import suppress
from socket import gethostname


def process_identity(pid: int | None = None) -> str:
    """Return the host, id and start time of a process; by default of this one.

    The start time tells it from a later process with the same id; it is 0 if the process has ended, or the system
    has no /proc.
    """
    pid = os.getpid() if pid is None else pid
    started = "0"
    with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
        if fields[0] not in (b"Z", b"X"):
            started = fields[19].decode()
    return f"{gethostname()} {pid} {started}"


def runs_beside(identity: str) -> int | None:
    """Return the id of the process of an identity if it is another one that runs on this host, else None."""
    pid = int(identity.split()[1])
    is_known = not identity.endswith(" 0") and pid != os.getpid()
    return pid if is_known and process_identity(pid) == identity else None
