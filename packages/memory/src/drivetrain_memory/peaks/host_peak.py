"""The peak of this process and of its children during a block."""

import os
from dataclasses import dataclass
from pathlib import Path

from drivetrain_memory.peaks.process_peak import PeakSource, PortablePeak, ProcessPeak, lifetime_peak_bytes
from drivetrain_memory.usage.processes import PROC, ProcessKey, descendants_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildPeak:
    """The peak of a child process, or of a child's child.

    Attributes:
        peak_bytes: The peak resident memory during the block, in bytes.
        before_bytes: The resident memory when the block began; 0 for a process that began in it.
        source: "kernel" for the exact peak; "sampled" for the larger of the values at begin and end, if the kernel's
            mark could not be reset.
        has_ended: Whether the process ended in the block; its memory after the last reading is then unknown.
    """

    pid: int
    peak_bytes: int
    before_bytes: int
    source: PeakSource
    has_ended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPeak:
    """The peak of host memory during a block; see `PeakRecord` for its numbers."""

    peak_bytes: int = 0
    before_bytes: int = 0
    source: PeakSource = "kernel"
    children: tuple[ChildPeak, ...] = ()
    ended_child_bytes: int | None = None


class HostPeakMeter:
    """A measurement of a block, from construction on."""

    def __init__(self, *, children: bool, proc: Path = PROC) -> None:
        self._pid, self._proc = os.getpid(), proc
        self._counts_children = children
        self._children: dict[ProcessKey, ProcessPeak] = {}
        self._living: set[ProcessKey] = set()
        self._ended_before = lifetime_peak_bytes(of_ended_children=True) if children else 0
        if children:
            self._living = set(descendants_of(self._pid, proc=proc))
            self._children = {key: ProcessPeak(key.pid, proc=proc) for key in self._living}
        own = ProcessPeak(self._pid, proc=proc)
        self._own: ProcessPeak | PortablePeak = own if own.source == "kernel" else PortablePeak()

    def read(self) -> HostPeak:
        """Return the peaks so far."""
        self._own.update()
        ended_child_bytes: int | None = None
        if self._counts_children:
            self._living = set(descendants_of(self._pid, proc=self._proc))
            for key in self._living:
                if key not in self._children:
                    self._children[key] = ProcessPeak(key.pid, born_within=True, proc=self._proc)
                self._children[key].update()
            # The system keeps the largest peak of all children ever, and a started program inherits the mark of the
            # process that starts it: a number up to this process's own peak may be that mark.
            largest = lifetime_peak_bytes(of_ended_children=True)
            if largest > max(self._ended_before, self._own.peak_bytes):
                ended_child_bytes = largest
        return HostPeak(
            peak_bytes=self._own.peak_bytes,
            before_bytes=self._own.before_bytes,
            source=self._own.source,
            children=tuple(
                ChildPeak(
                    pid=key.pid,
                    peak_bytes=peak.peak_bytes,
                    before_bytes=peak.before_bytes,
                    source=peak.source,
                    has_ended=key not in self._living,
                )
                for key, peak in sorted(self._children.items())
            ),
            ended_child_bytes=ended_child_bytes,
        )

    def include(self, inner: "HostPeakMeter") -> None:
        """Raise the peaks to the peaks of an inner measurement."""
        self._own.include(inner._own.peak_bytes)
        for key, peak in inner._children.items() if self._counts_children else ():
            self._children.setdefault(key, peak).include(peak.peak_bytes)

    def stop(self) -> None:
        """End the sampling thread; do nothing without one."""
        self._own.stop()
