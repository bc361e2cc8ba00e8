"""The peak resident memory of one process between two moments, from the kernel's high-water mark."""

import sys
import threading
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

from drivetrain_memory.usage.processes import PROC

# "kernel": the high-water mark, exact. "getrusage": the mark of the whole life of the process, which rose in the
# block and so is exact too. "sampled": the largest of several looks, a lower bound.
PeakSource = Literal["kernel", "getrusage", "sampled"]

_INTERVAL_SECONDS = 0.002
_RESET_PEAK = "5"  # proc(5): since Linux 4.0, resets the peak to the current resident memory


class HighWater(NamedTuple):
    """The kernel's numbers of a process."""

    peak_bytes: int  # since the last reset, or since the process began
    resident_bytes: int


def read_high_water(pid: int, *, proc: Path = PROC) -> HighWater | None:
    """Read `VmHWM` and `VmRSS` of a process; None if the process is gone or the system has no such file."""
    try:
        text = (proc / str(pid) / "status").read_bytes()
    except OSError:
        return None
    found = {
        line[: line.index(b":")]: int(line.split()[1]) * 1024
        for line in text.splitlines()
        if line.startswith((b"VmHWM:", b"VmRSS:"))
    }
    if b"VmHWM" not in found:  # a zombie has no memory left to count
        return None
    # The two are read one after the other, and a page may come between.
    return HighWater(peak_bytes=max(found[b"VmHWM"], found[b"VmRSS"]), resident_bytes=found[b"VmRSS"])


def reset_high_water(pid: int, *, proc: Path = PROC) -> bool:
    """Reset the high-water mark of a process to its current resident memory; return False where the system cannot.

    The reset needs Linux with a writable /proc, and a process of the same user.
    """
    try:
        (proc / str(pid) / "clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def lifetime_peak_bytes(*, of_ended_children: bool = False) -> int:
    """Return the peak resident memory of this process, or the largest of any child that ended and was waited for.

    The portable interfaces report the peak since the process began; 0 for children on Windows.
    """
    if sys.platform == "win32":
        return 0 if of_ended_children else int(psutil.Process().memory_info().peak_wset)
    import resource

    whose = resource.RUSAGE_CHILDREN if of_ended_children else resource.RUSAGE_SELF
    peak = resource.getrusage(whose).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts in bytes, other systems in KiB


class ProcessPeak:
    """The peak of one process since this object was made, updated from its high-water mark.

    Args:
        born_within: Whether the process began after the measurement did: its whole life then counts.
    """

    def __init__(self, pid: int, *, born_within: bool = False, proc: Path = PROC) -> None:
        self._pid, self._proc = pid, proc
        before = HighWater(0, 0) if born_within else read_high_water(pid, proc=proc)
        self._is_exact = born_within or (before is not None and reset_high_water(pid, proc=proc))
        self._mark_before, self.before_bytes = before or HighWater(0, 0)
        self.peak_bytes = self.before_bytes

    @property
    def source(self) -> PeakSource:
        """The source of `peak_bytes`: the kernel's mark if it was reset, or has risen since."""
        return "kernel" if self._is_exact else "sampled"

    def update(self) -> None:
        """Raise the peak to the kernel's mark, unless the process is gone."""
        now = read_high_water(self._pid, proc=self._proc)
        if now is not None:
            self._is_exact = self._is_exact or now.peak_bytes > self._mark_before
            self.include(now.peak_bytes if self._is_exact else now.resident_bytes)

    def include(self, peak_bytes: int) -> None:
        """Raise the peak to the peak of an inner measurement."""
        self.peak_bytes = max(self.peak_bytes, peak_bytes)

    def stop(self) -> None:
        """Do nothing: no thread samples."""


class PortablePeak:
    """The peak of this process since the construction of this object, from `getrusage` or from samples.

    `getrusage` gives the peak of the process's entire life. If it rose in the block, it is the block's exact peak.
    Otherwise the largest sample counts: a thread takes one every 2 ms, and misses shorter peaks.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._lifetime_before = lifetime_peak_bytes()
        self.peak_bytes = self.before_bytes = self._sampled = self._resident()
        self.source: PeakSource = "sampled"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="drivetrain-peak", daemon=True)
        self._thread.start()

    def update(self) -> None:
        """Update the peak from the process's lifetime peak if that rose in the block, otherwise from the samples."""
        lifetime = lifetime_peak_bytes()
        if lifetime > self._lifetime_before:
            self.source = "getrusage"
            self.include(lifetime)
        else:
            self.include(max(self._sampled, self._resident()))

    def include(self, peak_bytes: int) -> None:
        """Raise the peak to the peak of an inner measurement."""
        self.peak_bytes = max(self.peak_bytes, peak_bytes)

    def stop(self) -> None:
        """End the thread that samples."""
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(_INTERVAL_SECONDS):
            self._sampled = max(self._sampled, self._resident())

    def _resident(self) -> int:
        return int(self._process.memory_info().rss)
