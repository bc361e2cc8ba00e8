"""A thread that samples the memory of a rank, with phases, steps and a summary at the end."""

import logging
import math
import threading
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch
from torch import nn

from drivetrain_memory.breakdown.activations import ActivationMemory
from drivetrain_memory.breakdown.model_memory import MemoryBreakdown, memory_breakdown
from drivetrain_memory.peaks.peak_record import PeakRecord, record_peak
from drivetrain_memory.tracker.rank_summary import PhaseUse, RankSummary, write_summary
from drivetrain_memory.tracker.sample_recorder import SampleRecorder, samples_file
from drivetrain_memory.usage.sampler import SamplerSettings, UsageSampler

_logger = logging.getLogger(__name__)
_MOST_PHASES = 64  # names that differ; the others count as one
OTHER_PHASES = "(other)"


class MemoryTracker:
    """The memory of this rank over its run: host, children, control group and every device.

    A thread takes a sample every `interval_seconds`; phases also have exact peaks, from the counters that
    `record_peak` reads. The newest samples stay in a ring of fixed size. All samples are written to
    `FOLDER/memory-rank-RANK.jsonl`, and at the end a summary to `FOLDER/memory-rank-RANK.json`. `read_summaries`
    merges the summaries of all ranks. Create a tracker on each rank; ranks do not communicate.

    Args:
        folder: The folder of this run, which the ranks share; None writes nothing.
        rank: The index of this process in the run.
        interval_seconds: The time between two samples; at 0.1 s the thread takes less than 1 % of a core.
        settings: The times between two readings of expensive sources.

    Raises:
        ValueError: The interval or the rank is no number, or out of range.

    Example:
        >>> with MemoryTracker(None) as tracker:
        ...     for step in range(2):
        ...         with tracker.phase("forward"):
        ...             block = bytes(10_000_000)
        ...         tracker.step()
        >>> tracker.summary().phases["forward"].count
        2
    """

    def __init__(
        self,
        folder: str | Path | None,
        *,
        rank: int = 0,
        interval_seconds: float = 0.1,
        settings: SamplerSettings | None = None,
    ) -> None:
        if not (isinstance(interval_seconds, int | float) and 0.001 <= interval_seconds <= 3600):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"interval_seconds={interval_seconds!r}: give 0.001 to 3600")
        if not isinstance(rank, int) or rank < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"rank={rank!r}: must be an integer, 0 or more")
        self._folder = None if folder is None else Path(folder)
        self._rank, self._interval_seconds, self._settings = rank, interval_seconds, settings
        self._phases = PhaseStack()
        self._step: int | None = None
        self._started: tuple[SampleRecorder, PeakRecord] | None = None
        self._thread = threading.Thread(target=self._sample, name="drivetrain-memory", daemon=True)
        self._ended = threading.Event()
        self._cpu_seconds = 0.0
        self._breakdown: MemoryBreakdown | None = None
        self._summary: RankSummary | None = None

    def start(self) -> None:
        """Begin to sample. `with tracker:` does the same, and stops at the end.

        RuntimeError if the tracker was started before; OSError if the file of samples cannot be made.
        """
        if self._started is not None:
            raise RuntimeError("this tracker was started before: create a new one for each measurement")
        recorder = SampleRecorder(
            UsageSampler(settings=self._settings),
            rank=self._rank,
            interval_seconds=self._interval_seconds,
            file=None if self._folder is None else samples_file(self._folder, self._rank),
        )
        self._started = recorder, record_peak(children=False).__enter__()
        recorder.take()
        self._thread.start()

    def stop(self) -> RankSummary:
        """Take a last sample, write the summary and return it; a second call returns the same.

        Any thread may call it. RuntimeError if the tracker was not started; OSError if the summary cannot be written.
        """
        if self._summary is not None:
            return self._summary
        recorder, peak = self._require_started()
        self._ended.set()
        self._thread.join()
        try:
            recorder.take(phase=self._phases.path, step=self._step)
            peak.__exit__(None, None, None)
        finally:
            recorder.close()
        self._summary = self.summary()
        if self._folder is not None:
            write_summary(self._folder, self._summary)
        return self._summary

    @contextmanager
    def phase(self, name: str) -> Generator[PeakRecord]:
        """Run the block as a phase with a name, such as "forward", and an exact peak; phases may be nested.

        A phase costs some 150 us. Enter phases in the thread that started the tracker. ValueError if the name is
        empty or has a slash.
        """
        before = self._phases.enter(name)
        begin = time.perf_counter()
        peak = record_peak(children=False)
        try:
            with peak:
                yield peak
        finally:
            self._phases.leave(before, time.perf_counter() - begin, peak)

    def step(self, number: int | None = None) -> None:
        """Mark the beginning of a step; `number` defaults to the next step."""
        self._step = number if number is not None else (0 if self._step is None else self._step + 1)

    def record_breakdown(
        self,
        model: nn.Module,
        optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
        *,
        activations: ActivationMemory | None = None,
    ) -> MemoryBreakdown:
        """Measure the model's memory now; store the breakdown in the summary, in place of the last, and return it."""
        self._breakdown = memory_breakdown(model, optimizers, activations=activations)
        return self._breakdown

    def as_metrics(self) -> dict[str, float]:
        """Return the newest sample as flat names and numbers for a tracker, such as "memory/host/resident_bytes".

        Numbers that are not known are left out.
        """
        newest = self._require_started()[0].newest
        return {
            f"memory/{name}": value
            for name, value in newest.items()
            if name != "seconds" and not math.isnan(value)
        }

    def samples(self) -> list[dict[str, float]]:
        """Return the newest samples, at most 6000, oldest first; older samples are on disk only."""
        recorder, _ = self._require_started()
        return [dict(zip(recorder.columns, row, strict=True)) for row in recorder.ring]

    def summary(self) -> RankSummary:
        """Return the summary so far; after `stop`, the last one."""
        if self._summary is not None:
            return self._summary
        recorder, peak = self._require_started()
        return recorder.summary(
            host_peak_bytes=peak.host_bytes,
            host_source=peak.host_source,
            device_peaks={device.device: device.peak_bytes for device in peak.devices},
            phases=self._phases.uses,
            sampling_cpu_seconds=self._cpu_seconds,
            breakdown=self._breakdown,
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _require_started(self) -> tuple[SampleRecorder, PeakRecord]:
        if self._started is None:
            raise RuntimeError("this tracker is not started: use it as `with tracker:`, or call start()")
        return self._started

    def _sample(self) -> None:
        recorder, _ = self._require_started()
        due = time.monotonic()
        while True:
            due = max(due + self._interval_seconds, time.monotonic())  # what was missed is not made up for
            if self._ended.wait(due - time.monotonic()):
                return
            try:
                recorder.take(phase=self._phases.path, step=self._step)
            except Exception:  # training goes on without samples
                _logger.warning("sampling of memory failed and ends here", exc_info=True)
                return
            finally:
                self._cpu_seconds = time.thread_time()


class PhaseStack:
    """The current phases, and the peaks of past ones."""

    def __init__(self) -> None:
        self.path = ""  # the thread that trains changes it; another may read it at any time
        self.uses: dict[str, PhaseUse] = {}

    def enter(self, name: str) -> str:
        """Begin a phase inside the current phase, and return the previous path."""
        if not name or "/" in name:
            raise ValueError(
                f"phase {name!r}: give a name without a slash; nested phases are joined by slashes"
            )
        before, path = self.path, f"{self.path}/{name}" if self.path else name
        is_known = path in self.uses or len(self.uses) < _MOST_PHASES
        self.path = path if is_known else OTHER_PHASES
        return before

    def leave(self, before: str, seconds: float, peak: PeakRecord) -> None:
        """End the current phase."""
        use = self.uses.get(self.path, PhaseUse())
        self.uses[self.path] = PhaseUse(
            count=use.count + 1,
            seconds=use.seconds + seconds,
            host_peak_bytes=max(use.host_peak_bytes, peak.host_bytes),
            host_added_bytes=max(use.host_added_bytes, peak.host_bytes - peak.host_before_bytes),
            device_peak_bytes=max(use.device_peak_bytes, sum(one.peak_bytes for one in peak.devices)),
        )
        self.path = before
