"""The identity of a process, by which other processes on its host can tell whether it still runs."""

import os
from pathlib import Path

_PROC = Path("/proc")


def process_identity(pid: int | None = None, *, proc: Path = _PROC) -> str:
    """Return the identity of a process: the namespace of its id, the id, and its start time.

    The start time tells the process from a later process with the same id. The time is 0 if the process has ended or
    the system has no /proc.
    """
    pid = os.getpid() if pid is None else pid
    try:
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
        namespace = f"{boot}/{(proc / 'self/ns/pid').readlink()}"
        text = (proc / str(pid) / "stat").read_text()
    except OSError:  # no such process, or no such files
        return f"- {pid} 0"
    fields = text.rpartition(")")[2].split()  # a program's name may hold spaces and brackets
    return f"{namespace} {pid} {'0' if fields[0] in 'ZX' else fields[19]}"


def runs_beside(identity: str, *, proc: Path = _PROC) -> int | None:
    """Return the process id in an identity if another process on this host has the identity, else None."""
    pid = int(identity.split()[1])
    is_known = not identity.endswith(" 0") and pid != os.getpid()
    return pid if is_known and process_identity(pid, proc=proc) == identity else None


def has_ended(identity: str, *, proc: Path = _PROC) -> bool:
    """Return whether a process is known to have ended; False for a process on another host."""
    namespace, pid, started = identity.split()
    own = process_identity(proc=proc)
    is_known = started != "0" and namespace == own.split()[0]
    return is_known and process_identity(int(pid), proc=proc) != identity
