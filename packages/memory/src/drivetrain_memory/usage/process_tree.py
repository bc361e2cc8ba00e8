"""The descendants of a process."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

PROC = Path("/proc")
_START_TIME = 19  # field 22 of proc_pid_stat(5), counted behind the name: ticks since the system began


class ProcessKey(NamedTuple):
    """A process that no later one is taken for: the system uses process ids again.

    Attributes:
        started: The start time, in the system's own unit.
    """

    pid: int
    started: float


def descendants_of(pid: int, *, proc: Path = PROC) -> tuple[ProcessKey, ...]:
    """Return all living descendants of a process, parents before children; empty if the process is gone.

    On Linux this reads the kernel's own lists of children, which takes some 10 us for each thread of each process.
    """
    if not (proc / str(pid) / "task" / str(pid) / "children").exists():
        return _portable(pid)
    return tuple(_descend(pid, proc))


def start_time(pid: int, *, proc: Path = PROC) -> float | None:
    """Return when a process started, in the system's own unit; None if it is gone."""
    try:
        fields = (proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return float(fields[_START_TIME])


def _descend(pid: int, proc: Path) -> Iterator[ProcessKey]:
    for child in _children(pid, proc):
        if (started := start_time(child, proc=proc)) is not None:
            yield ProcessKey(child, started)
            yield from _descend(child, proc)


def _children(pid: int, proc: Path) -> list[int]:
    found: list[int] = []
    try:
        threads = list((proc / str(pid) / "task").iterdir())
    except OSError:
        return found
    for thread in threads:
        try:
            found += map(int, (thread / "children").read_bytes().split())
        except OSError:  # the thread ended meanwhile
            continue
    return found


def _portable(pid: int) -> tuple[ProcessKey, ...]:
    try:
        children = psutil.Process(pid).children(recursive=True)
        return tuple(ProcessKey(child.pid, child.create_time()) for child in children)
    except psutil.Error:
        return ()
