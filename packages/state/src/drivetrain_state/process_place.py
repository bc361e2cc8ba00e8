"""The process of another rank, and whether it still runs: known at once on one host, by the kernel's files."""

from pathlib import Path
from typing import TypeAlias

_PROC = Path("/proc")
# The processes that see each other under the same ids, the id, and when it started, which another process of the
# same id did not.
ProcessPlace: TypeAlias = tuple[str, int, int]


def own_place(*, proc: Path = _PROC) -> ProcessPlace | None:
    """Return the place of this process, to be told to other ranks; None where the system does not tell it.

    Args:
        proc: The folder of the kernel's process files.
    """
    try:
        pid = int((proc / "self").readlink().name)
        seen_by = (
            f"{(proc / 'sys/kernel/random/boot_id').read_text().strip()} {(proc / 'self/ns/pid').readlink()}"
        )
    except OSError:
        return None
    started = _started(proc, pid)
    return None if started is None else (seen_by, pid, started)


def has_ended(place: ProcessPlace, seen_from: ProcessPlace | None, *, proc: Path = _PROC) -> bool:
    """Return whether a process is known to have ended; false also where it runs on another host.

    Args:
        place: The `own_place` that the process has told.
        seen_from: The place of this process.
        proc: The folder of the kernel's process files.
    """
    return seen_from is not None and place[0] == seen_from[0] and _started(proc, place[1]) != place[2]


def _started(proc: Path, pid: int) -> int | None:
    """Return when a process started, in ticks since the host did; None if it has ended."""
    try:
        text = (proc / str(pid) / "stat").read_text()
    except OSError:  # no such process
        return None
    fields = text.rpartition(")")[2].split()  # a program's name may hold spaces and brackets
    return None if fields[0] in "ZX" else int(fields[19])
