"""The peak resident memory of one process between two moments, from the kernel's high-water mark."""

import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from drivetrain_memory.usage.processes import PROC

# "kernel": the high-water mark, exact. "getrusage": the mark of the whole life of the process, which rose in the
# block and so is exact too. "sampled": the largest of several looks, a lower bound.
PeakSource = Literal["kernel", "getrusage", "sampled"]

_INTERVAL_SECONDS = 0.002
_RESET_PEAK = "5"  # proc(5): since Linux 4.0, resets the peak to the current resident memory


@dataclass(frozen=True, slots=True, kw_only=True)
class HighWater:
    """The kernel's numbers of a process.

    Attributes:
        peak_bytes: The peak resident memory since the last reset, or since the process began.
    """

    peak_bytes: int
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

    It takes Linux with a writable /proc, and a process of the same user.
    """
    try:
        (proc / str(pid) / "clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def lifetime_peak_bytes() -> int:
    """Return the peak resident memory of this process since it began, as the portable interfaces tell it."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    return in_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def largest_ended_child_bytes() -> int:
    """Return the largest peak of any child that ended and was waited for; 0 where the system keeps none."""
    if sys.platform == "win32":
        return 0
    import resource

    return in_bytes(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)


def in_bytes(ru_maxrss: int) -> int:
    """Return the bytes of a `ru_maxrss`: macOS counts in bytes, other systems in KiB."""
    return ru_maxrss if sys.platform == "darwin" else ru_maxrss * 1024


class ProcessPeak:
    """The peak of one process since this object was made, updated from its high-water mark.

    Args:
        born_within: Whether the process began after the measurement did: its whole life then counts.
    """

    def __init__(self, pid: int, *, born_within: bool = False, proc: Path = PROC) -> None:
        self._pid, self._proc = pid, proc
        before = read_high_water(pid, proc=proc)
        self._mark_before = 0 if before is None or born_within else before.peak_bytes
        self._is_reset = born_within or (before is not None and reset_high_water(pid, proc=proc))
        self.before_bytes = 0 if before is None or born_within else before.resident_bytes
        self.peak_bytes = self.before_bytes
        self._has_grown = False

    @property
    def is_exact(self) -> bool:
        """True if the peak is the kernel's: the mark was reset, or has risen since."""
        return self._is_reset or self._has_grown

    def update(self) -> bool:
        """Raise the peak to the kernel's mark; return False if the process is gone."""
        now = read_high_water(self._pid, proc=self._proc)
        if now is None:
            return False
        self._has_grown = self._has_grown or now.peak_bytes > self._mark_before
        seen = now.peak_bytes if self.is_exact else now.resident_bytes
        self.peak_bytes = max(self.peak_bytes, seen)
        return True

    def include(self, peak_bytes: int) -> None:
        """Raise the peak to that of a measurement within this one."""
        self.peak_bytes = max(self.peak_bytes, peak_bytes)


class PortablePeak:
    """The peak of this process since the construction of this object, from `getrusage` or from samples.

    `getrusage` gives the peak of the process's entire life. If it rose in the block, it is the block's exact peak.
    Otherwise the largest sample counts: a thread takes one every 2 ms, and misses shorter peaks.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._lifetime_before = lifetime_peak_bytes()
        self._sampled = self.before_bytes = self._resident()
        self._included = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="drivetrain-peak", daemon=True)
        self._thread.start()

    @property
    def source(self) -> Literal["getrusage", "sampled"]:
        """The counter that `peak_bytes` comes from."""
        return "getrusage" if lifetime_peak_bytes() > self._lifetime_before else "sampled"

    @property
    def peak_bytes(self) -> int:
        """The peak resident memory so far, in bytes."""
        lifetime = lifetime_peak_bytes()
        own = lifetime if lifetime > self._lifetime_before else max(self._sampled, self._resident())
        return max(own, self._included)

    def include(self, peak_bytes: int) -> None:
        """Raise the peak to that of a measurement within this one."""
        self._included = max(self._included, peak_bytes)

    def stop(self) -> None:
        """End the thread that samples."""
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(_INTERVAL_SECONDS):
            self._sampled = max(self._sampled, self._resident())

    def _resident(self) -> int:
        return int(self._process.memory_info().rss)
