"""The record of samples: the newest in a ring, all of them on disk, the whole run in a timeline."""

import math
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from drivetrain_memory.breakdown.memory_shares import MemoryBreakdown
from drivetrain_memory.tracker.rank_summary import PhaseUse, RankSummary, SampledPeak
from drivetrain_memory.tracker.ring import SampleRing
from drivetrain_memory.tracker.sample_stream import SampleStream
from drivetrain_memory.tracker.timeline import TimelineBuilder
from drivetrain_memory.usage.sampler import UsageSampler

_RING_ROWS = 6000  # ten minutes at ten a second


class SampleRecorder:
    """The samples of one process."""

    def __init__(
        self, sampler: UsageSampler, *, rank: int, interval_seconds: float, file: Path | None
    ) -> None:
        self._sampler, self._rank, self._interval_seconds = sampler, rank, interval_seconds
        self._started_at, self._begin = time.time(), time.monotonic()
        self.columns = ("seconds", *sampler.columns)
        self.ring = SampleRing(len(self.columns), _RING_ROWS)
        self._timeline = TimelineBuilder(sampler.columns, bucket_seconds=interval_seconds)
        self._peaks: dict[str, SampledPeak] = {}
        self._num_samples = 0
        self.newest: Mapping[str, float] = {}
        header = {"rank": rank, "pid": sampler.pid, "host": socket.gethostname(), "time": self._started_at}
        self._stream = None if file is None else SampleStream(file, header)

    def take(self, *, phase: str = "", step: int | None = None) -> bool:
        """Take a sample; return False if the process ended."""
        row = self._sampler.sample()
        if row is None:
            return False
        seconds = time.monotonic() - self._begin
        timed = [seconds, *row]
        self.ring.add(timed)
        self._timeline.add(seconds, row, phase)
        for name, value in zip(self._sampler.columns, row, strict=True):
            best = self._peaks.get(name)
            if not math.isnan(value) and (best is None or value > best.value):
                self._peaks[name] = SampledPeak(value=value, seconds=seconds, phase=phase, step=step)
        if self._stream is not None:
            self._stream.write(self.columns, timed, phase=phase, step=step)
        self._num_samples += 1
        self.newest = dict(zip(self.columns, timed, strict=True))
        return True

    def close(self) -> None:
        """Close the file and the sources."""
        if self._stream is not None:
            self._stream.close()
        self._sampler.close()

    def summary(
        self,
        *,
        host_peak_bytes: int,
        host_source: str,
        device_peaks: Mapping[str, int],
        phases: Mapping[str, PhaseUse],
        sampling_cpu_seconds: float,
        breakdown: MemoryBreakdown | None = None,
    ) -> RankSummary:
        """Return the summary of all samples so far, with what is known beside them."""
        return RankSummary(
            rank=self._rank,
            host=socket.gethostname(),
            pid=self._sampler.pid,
            started_at=self._started_at,
            seconds=time.monotonic() - self._begin,
            interval_seconds=self._interval_seconds,
            num_samples=self._num_samples,
            num_lost=0 if self._stream is None else self._stream.num_lost,
            sampling_cpu_seconds=sampling_cpu_seconds,
            host_peak_bytes=host_peak_bytes,
            host_source=host_source,
            device_peaks=device_peaks,
            peaks=dict(self._peaks),
            phases=dict(phases),
            timeline=self._timeline.build(),
            models=self._sampler.models,
            absent_drivers=self._sampler.absent_drivers,
            breakdown=breakdown,
        )


def samples_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's samples."""
    return folder / f"memory-rank-{rank:05}.jsonl"
