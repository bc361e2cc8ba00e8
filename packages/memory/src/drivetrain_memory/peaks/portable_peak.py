"""The peak of this process where the system cannot reset its high-water mark: other than Linux, a read-only /proc."""

import threading
from typing import Literal

import psutil

from drivetrain_memory.peaks.process_peak import lifetime_peak_bytes

_INTERVAL_SECONDS = 0.002


class PortablePeak:
    """The peak of this process since this object was made, from `getrusage` or, if that did not rise, from samples.

    The mark that `getrusage` tells is that of the whole life of the process. If it rose, it rose in the block, and is
    its exact peak. If not, the largest of the samples counts: a thread takes one every 2 ms, and misses what is
    shorter.
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
