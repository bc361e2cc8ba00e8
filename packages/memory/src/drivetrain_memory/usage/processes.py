"""The descendants of a process, and the memory that a process holds, read at next to no cost."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

# psutil is imported where /proc does not answer: it takes 5 ms, of every process that reads a limit.
PROC = Path("/proc")
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_START_TIME = 19  # field 22 of proc_pid_stat(5), counted behind the name: ticks since the system began


class ProcessKey(NamedTuple):
    """The identity of a process: its id, which the system may reuse, and its start time."""

    pid: int
    started: float  # in the system's own unit


def descendants_of(pid: int, *, proc: Path = PROC) -> tuple[ProcessKey, ...]:
    """Return all living descendants of a process, parents before children; empty if the process is gone.

    On Linux this reads the kernel's lists of children, which takes some 10 us for each thread of each process.
    """
    if not (proc / str(pid) / "task" / str(pid) / "children").exists():
        import psutil

        try:
            children = psutil.Process(pid).children(recursive=True)
            return tuple(ProcessKey(child.pid, child.create_time()) for child in children)
        except psutil.Error:
            return ()
    return tuple(_descend(pid, proc))


def start_time(pid: int, *, proc: Path = PROC) -> float | None:
    """Return when a process started, in the system's own unit; None if the process is gone."""
    try:
        fields = (proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return float(fields[_START_TIME])


def _descend(pid: int, proc: Path) -> Iterator[ProcessKey]:
    children: list[int] = []
    with suppress(OSError):  # the process ended meanwhile
        for thread in (proc / str(pid) / "task").iterdir():
            with suppress(OSError):  # the thread ended meanwhile
                children += map(int, (thread / "children").read_bytes().split())
    for child in children:
        if (started := start_time(child, proc=proc)) is not None:
            yield ProcessKey(child, started)
            yield from _descend(child, proc)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUsage:
    """The memory of one process."""

    resident_bytes: int  # of all pages, also those of files and those shared with other processes
    shared_bytes: int  # of files and shared memory among them; 0 where the system does not tell


class ProcessReader:
    """A reader of one process with its file kept open: a reading is one system call of some 10 us."""

    def __init__(self, pid: int, *, proc: Path = PROC) -> None:
        self._pid, self._proc = pid, proc
        self._process: Any = None  # of psutil, where /proc does not answer
        self._file: int | None = None
        try:
            self._file = os.open(proc / str(pid) / "statm", os.O_RDONLY)
        except OSError:
            import psutil

            if psutil.pid_exists(pid):
                self._process = psutil.Process(pid)

    def read(self) -> ProcessUsage | None:
        """Return the current memory of the process; None if the process is gone."""
        if self._file is not None:
            try:
                fields = os.pread(self._file, 128, 0).split()
            except ProcessLookupError:
                return None
            if len(fields) < 3:
                return None
            return ProcessUsage(resident_bytes=int(fields[1]) * _PAGE, shared_bytes=int(fields[2]) * _PAGE)
        if self._process is None:
            return None
        import psutil

        try:
            held = self._process.memory_info()
        except psutil.Error:
            return None
        return ProcessUsage(resident_bytes=held.rss, shared_bytes=getattr(held, "shared", 0))

    def proportional_bytes(self) -> int | None:
        """Return the proportional set size: shared pages divided by the number of processes that share them.

        The kernel walks all pages for it, which takes milliseconds. None if the kernel does not report it.
        """
        try:
            lines = (self._proc / str(self._pid) / "smaps_rollup").read_bytes().splitlines()
        except OSError:  # not Linux, or a process of another user, or it is gone
            return None
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(b"Pss:")), None)

    def close(self) -> None:
        """Close the open file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
