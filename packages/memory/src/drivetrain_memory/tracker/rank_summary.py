"""The summary of a rank's memory, and the merge of all ranks' summaries."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drivetrain_memory.breakdown.memory_shares import MemoryBreakdown, ModuleMemory
from drivetrain_memory.tracker.timeline import Timeline

_VERSION = 1
_PREFIX = "memory-rank-"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseUse:
    """All runs of one phase."""

    count: int = 0
    seconds: float = 0.0
    host_peak_bytes: int = 0
    host_added_bytes: int = 0  # the most that a run had above its beginning
    device_peak_bytes: int = 0  # of tensors on all accelerators together


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledPeak:
    """The largest sample of a column."""

    value: float
    seconds: float
    phase: str
    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """The memory of one rank over its run.

    Attributes:
        started_at: The begin, in seconds since 1970.
        seconds: The time from begin to end.
        num_lost: The samples that could not be written to disk.
        sampling_cpu_seconds: The processor time that sampling took.
        host_peak_bytes: The exact peak of the process, which samples may miss.
        host_source: The source of that peak: "kernel" and "getrusage" are exact, "sampled" is a lower bound.
        device_peaks: The exact peak of tensors on each accelerator.
        phases: The phases by path.
        timeline: The maxima over time, in a fixed number of buckets.
        models: The product names of devices.
        absent_drivers: The reason why a vendor's devices are not read, by vendor.
        breakdown: The memory of the model, if it was recorded.
    """

    rank: int
    host: str
    pid: int
    started_at: float
    seconds: float
    interval_seconds: float
    num_samples: int
    num_lost: int
    sampling_cpu_seconds: float
    host_peak_bytes: int
    host_source: str
    device_peaks: Mapping[str, int]
    peaks: Mapping[str, SampledPeak]
    phases: Mapping[str, PhaseUse]
    timeline: Timeline
    models: Mapping[str, str] = field(default_factory=dict[str, str])
    absent_drivers: Mapping[str, str] = field(default_factory=dict[str, str])
    breakdown: MemoryBreakdown | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self) | {"version": _VERSION, "timeline": self.timeline.to_json()}

    @classmethod
    def from_json(cls, described: Mapping[str, Any]) -> "RankSummary":
        """Return the summary that `to_json` described; ValueError if another version wrote it."""
        if (found := described.get("version")) != _VERSION:
            raise ValueError(f"a summary of version {found!r}: this drivetrain-memory reads {_VERSION}")
        plain: dict[str, Any] = {name: described[name] for name in cls.__slots__}
        plain["peaks"] = {name: SampledPeak(**peak) for name, peak in plain["peaks"].items()}
        plain["phases"] = {path: PhaseUse(**use) for path, use in plain["phases"].items()}
        plain["timeline"] = Timeline.from_json(plain["timeline"])
        if (breakdown := plain["breakdown"]) is not None:
            modules = tuple(ModuleMemory(**module) for module in breakdown["modules"])
            plain["breakdown"] = MemoryBreakdown(**(breakdown | {"modules": modules}))
        return cls(**plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMemory:
    """The memory of all ranks of a run: their summaries, in order."""

    ranks: tuple[RankSummary, ...]

    @property
    def started_at(self) -> float:
        """The begin of the first rank, in seconds since 1970."""
        return min(summary.started_at for summary in self.ranks)

    @property
    def seconds(self) -> float:
        """The time from the first begin to the last end."""
        return max(summary.started_at + summary.seconds for summary in self.ranks) - self.started_at

    def highest(self) -> dict[str, tuple[int, SampledPeak]]:
        """Return the largest sample of each column, with its rank."""
        found: dict[str, tuple[int, SampledPeak]] = {}
        for summary in self.ranks:
            for name, peak in summary.peaks.items():
                if name not in found or peak.value > found[name][1].value:
                    found[name] = (summary.rank, peak)
        return found

    def to_json(self) -> dict[str, Any]:
        """Return plain values: each rank's summary, and the highest of all."""
        return {
            "started_at": self.started_at,
            "seconds": self.seconds,
            "highest": {
                name: {"rank": rank, **asdict(peak)} for name, (rank, peak) in self.highest().items()
            },
            "ranks": [summary.to_json() for summary in self.ranks],
        }


def merge_summaries(summaries: Iterable[RankSummary]) -> RunMemory:
    """Merge the summaries of ranks, in any order; ValueError if there is none, or a rank has two."""
    ordered = tuple(sorted(summaries, key=lambda summary: summary.rank))
    if not ordered:
        raise ValueError("no summary to merge: give that of one rank at least")
    counts = Counter(summary.rank for summary in ordered)
    if twice := [rank for rank, count in counts.items() if count > 1]:
        raise ValueError(
            f"several summaries of rank {twice}: give each rank once, and each run its own folder"
        )
    return RunMemory(ranks=ordered)


def write_summary(folder: Path, summary: RankSummary) -> None:
    """Write a rank's summary into a folder that all ranks share; a reader never sees half of it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{_PREFIX}{summary.rank:05}.json"
    partial = file.with_suffix(f".{summary.pid}.part")
    partial.write_text(json.dumps(summary.to_json(), allow_nan=False), encoding="utf-8")
    os.replace(partial, file)


def read_summaries(folder: str | Path) -> RunMemory:
    """Read and merge the summaries of all ranks in a folder. Called on one rank, after all have stopped.

    FileNotFoundError if the folder has no summary; ValueError if one cannot be read.
    """
    files = sorted(Path(folder).glob(f"{_PREFIX}*.json"))
    if not files:
        raise FileNotFoundError(
            f"{folder} has no {_PREFIX}*.json: name the folder that MemoryTracker wrote into, "
            "and stop the trackers first"
        )
    summaries: list[RankSummary] = []
    for file in files:
        try:
            summaries.append(RankSummary.from_json(json.loads(file.read_text(encoding="utf-8"))))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"cannot read {file} as a summary of memory: {error}; delete it to read the others"
            ) from error
    return merge_summaries(summaries)
