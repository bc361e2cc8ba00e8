"""A whole run in a fixed number of buckets: the maximum of each column, and which phases ran."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Bucket:
    """The samples of an interval of time."""

    most: list[float]
    phases: Counter[str] = field(default_factory=Counter[str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The maxima and phases of a run, by bucket."""

    bucket_seconds: float
    columns: tuple[str, ...]
    values: Mapping[str, tuple[float, ...]]  # the maxima of each column; NaN where there is no number
    phases: tuple[Mapping[str, float], ...]  # the share of samples in each phase, 0 to 1

    def to_json(self) -> dict[str, Any]:
        """Return plain values; a missing number is None."""
        return {
            "bucket_seconds": self.bucket_seconds,
            "values": {
                name: [None if math.isnan(value) else value for value in values]
                for name, values in self.values.items()
            },
            "phases": [dict(shares) for shares in self.phases],
        }

    @classmethod
    def from_json(cls, described: Mapping[str, Any]) -> "Timeline":
        """Return the timeline that `to_json` described."""
        values = {
            name: tuple(math.nan if value is None else float(value) for value in column)
            for name, column in described["values"].items()
        }
        return cls(
            bucket_seconds=float(described["bucket_seconds"]),
            columns=tuple(values),
            values=values,
            phases=tuple(dict(shares) for shares in described["phases"]),
        )


class TimelineBuilder:
    """A timeline that grows by samples up to a number of buckets.

    When all buckets are in use, each pair of buckets becomes one bucket of twice the time, and no maximum is lost.
    """

    def __init__(self, columns: Sequence[str], *, bucket_seconds: float, num_buckets: int = 512) -> None:
        self._columns = tuple(columns)
        self._bucket_seconds = bucket_seconds
        self._num_buckets = num_buckets
        self._buckets: list[Bucket] = []

    def add(self, seconds: float, row: Sequence[float], phase: str) -> None:
        """Add a sample that was taken some seconds after the beginning."""
        while int(seconds / self._bucket_seconds) >= self._num_buckets:
            merged = self._buckets[::2]
            for first, second in zip(merged, self._buckets[1::2], strict=False):  # an odd last one stays
                first.most = _most(first.most, second.most)
                first.phases.update(second.phases)
            self._buckets = merged
            self._bucket_seconds *= 2
        index = int(seconds / self._bucket_seconds)
        while len(self._buckets) <= index:
            self._buckets.append(Bucket([math.nan] * len(self._columns)))
        bucket = self._buckets[index]
        bucket.most = _most(bucket.most, row)
        if phase:
            bucket.phases[phase] += 1
        bucket.phases[""] += 1  # all samples

    def build(self) -> Timeline:
        """Return the timeline so far."""
        return Timeline(
            bucket_seconds=self._bucket_seconds,
            columns=self._columns,
            values={
                name: tuple(bucket.most[index] for bucket in self._buckets)
                for index, name in enumerate(self._columns)
            },
            phases=tuple(
                {name: count / bucket.phases[""] for name, count in bucket.phases.items() if name}
                for bucket in self._buckets
            ),
        )


def _most(left: Sequence[float], right: Sequence[float]) -> list[float]:
    """Return the larger number of each pair; a known number counts more than NaN."""
    return [b if b > a or a != a else a for a, b in zip(left, right, strict=True)]
