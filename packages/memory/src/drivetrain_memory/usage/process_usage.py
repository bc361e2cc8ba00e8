"""The memory that a process holds now, read so that a look ten times a second costs next to nothing."""

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from drivetrain_memory.usage.process_tree import PROC

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUsage:
    """The memory of one process.

    Attributes:
        resident_bytes: The pages in memory, those of files and those shared with other processes included.
        shared_bytes: The part of them that belongs to files or to shared memory; 0 where the system does not tell.
    """

    resident_bytes: int
    shared_bytes: int


class ProcessReader:
    """A reader of one process that keeps its file open, so that a look is one system call of some 10 us."""

    def __init__(self, pid: int, *, proc: Path = PROC) -> None:
        self._pid, self._proc = pid, proc
        self._process: psutil.Process | None = None
        self._file: int | None = None
        try:
            self._file = os.open(proc / str(pid) / "statm", os.O_RDONLY)
        except OSError:
            if psutil.pid_exists(pid):
                self._process = psutil.Process(pid)

    def read(self) -> ProcessUsage | None:
        """Return what the process holds now; None if it is gone."""
        if self._file is not None:
            try:
                fields = os.pread(self._file, 128, 0).split()
            except ProcessLookupError:
                return None
            return (
                ProcessUsage(resident_bytes=int(fields[1]) * _PAGE, shared_bytes=int(fields[2]) * _PAGE)
                if len(fields) > 2
                else None
            )
        return None if self._process is None else _by_psutil(self._process)

    def proportional_bytes(self) -> int | None:
        """Return the proportional set size: shared pages divided by the number of processes that share them.

        The kernel walks all pages for it, which takes milliseconds. None if it does not tell.
        """
        try:
            lines = (self._proc / str(self._pid) / "smaps_rollup").read_bytes().splitlines()
        except OSError:  # not Linux, or a process of another user, or it is gone
            return None
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(b"Pss:")), None)

    def close(self) -> None:
        """Close the file that is kept open."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _by_psutil(process: psutil.Process) -> ProcessUsage | None:
    try:
        held = process.memory_info()
    except psutil.Error:
        return None
    return ProcessUsage(resident_bytes=held.rss, shared_bytes=getattr(held, "shared", 0))
