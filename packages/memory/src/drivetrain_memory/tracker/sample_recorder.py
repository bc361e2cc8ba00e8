"""The record of samples: the newest in a ring, all of them on disk, the whole run in a timeline."""

import json
import logging
import math
import socket
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path

from drivetrain_memory.breakdown.memory_shares import MemoryBreakdown
from drivetrain_memory.tracker.rank_summary import PhaseUse, RankSummary, SampledPeak
from drivetrain_memory.tracker.timeline import TimelineBuilder
from drivetrain_memory.usage.sampler import UsageSampler

_logger = logging.getLogger(__name__)
_FLUSH_EVERY = 10  # lines
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
        """Return the summary of all samples so far, together with the given values."""
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


class SampleRing:
    """A ring of rows of numbers; a new row takes the place of the oldest."""

    def __init__(self, num_columns: int, num_rows: int) -> None:
        self._num_columns, self._num_rows = num_columns, num_rows
        self._values = array("d", bytes(8 * num_columns * num_rows))
        self._count = 0  # of all rows that were ever added

    def __len__(self) -> int:
        return min(self._count, self._num_rows)

    def add(self, row: Sequence[float]) -> None:
        """Add a row."""
        start = (self._count % self._num_rows) * self._num_columns
        self._values[start : start + self._num_columns] = array("d", row)
        self._count += 1

    def __iter__(self) -> Iterator[tuple[float, ...]]:
        """Yield the rows, oldest first."""
        for number in range(self._count - len(self), self._count):
            start = (number % self._num_rows) * self._num_columns
            yield tuple(self._values[start : start + self._num_columns])


class SampleStream:
    """A file of JSON lines. A full disk loses samples, not the run: one warning, and lost lines are counted."""

    def __init__(self, file: Path, header: Mapping[str, object]) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._path = file
        self._file: TextIOWrapper | None = file.open("w", encoding="utf-8")
        self.num_lost = 0
        self._num_lines = 0
        self._write(json.dumps(header))

    def write(self, names: Sequence[str], row: Sequence[float], *, phase: str, step: int | None) -> None:
        """Write one sample; numbers that are not known are left out."""
        values: dict[str, object] = {
            name: int(value) if value.is_integer() else round(value, 6)
            for name, value in zip(names, row, strict=True)
            if math.isfinite(value)
        }
        if phase:
            values["phase"] = phase
        if step is not None:
            values["step"] = step
        self._write(json.dumps(values))

    def close(self) -> None:
        """Write the buffered samples and close the file."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            file.close()
        except OSError as error:
            self._lose(error)

    def _write(self, line: str) -> None:
        if self._file is None:
            self.num_lost += 1
            return
        try:
            self._file.write(f"{line}\n")
            self._num_lines += 1
            if self._num_lines % _FLUSH_EVERY == 1:
                self._file.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        if not self.num_lost:
            _logger.warning("samples of memory are lost from here on: %s: %s", self._path, error)
        self.num_lost += 1
