"""The operations in traces of torch's profiler: their times on each rank, merged over all ranks (pure)."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from drivetrain_messages import format_table

_CATEGORIES = frozenset(
    {"cpu_op", "user_annotation", "python_function", "kernel", "gpu_memcpy", "gpu_memset"}
)
_COUNTED = frozenset({"cpu_op", "kernel", "gpu_memcpy", "gpu_memset"})
_RANK = re.compile(r"trace-rank-(\d+)(?:\.\d+)?\.json")


@dataclass(slots=True)
class Span:
    """A call in a trace, with the calls inside it."""

    name: str
    category: str
    start_us: float
    duration_us: float
    inner: "list[Span]" = field(default_factory=list)

    @property
    def own_us(self) -> float:
        """The time that is not inside another call, in microseconds."""
        return max(0.0, self.duration_us - sum(one.duration_us for one in self.inner))


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTime:
    """The time of one operation over all ranks.

    Attributes:
        count: The number of calls, on all ranks together.
        own_ms: The time outside of inner operations, in milliseconds, by each rank that ran the operation.
        total_ms: The time with inner operations by rank, in milliseconds.
    """

    name: str
    count: int
    own_ms: Mapping[int, float]
    total_ms: Mapping[int, float]

    @property
    def mean_own_ms(self) -> float:
        """The mean of the own time over the ranks that ran it, in milliseconds."""
        return sum(self.own_ms.values()) / len(self.own_ms)

    @property
    def slowest_rank(self) -> int:
        """The rank with the largest own time."""
        return max(self.own_ms, key=lambda rank: self.own_ms[rank])


def nest(events: Iterable[Mapping[str, Any]]) -> dict[str, list[Span]]:
    """Return the calls of a trace, nested by time, by the thread or stream that they ran on."""
    found: dict[str, list[Span]] = {}
    stacks: dict[str, list[Span]] = {}
    wanted = [one for one in events if one.get("ph") == "X" and one.get("cat") in _CATEGORIES]
    for one in sorted(wanted, key=lambda event: (event["ts"], -event["dur"])):
        thread = f"{one.get('pid')} {one.get('tid')}"
        span = Span(str(one["name"]), str(one["cat"]), float(one["ts"]), float(one["dur"]))
        stack = stacks.setdefault(thread, [])
        while stack and span.start_us >= stack[-1].start_us + stack[-1].duration_us:
            stack.pop()
        (stack[-1].inner if stack else found.setdefault(thread, [])).append(span)
        stack.append(span)
    return found


def merge_operations(traces: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[OperationTime]:
    """Merge the operations in each rank's events, as `read_traces` returns them, largest mean own time first."""
    counts: dict[str, int] = {}
    own: dict[str, dict[int, float]] = {}
    total: dict[str, dict[int, float]] = {}
    for rank, events in traces.items():
        pending = [span for spans in nest(events).values() for span in spans]
        while pending:
            span = pending.pop()
            pending += span.inner
            if span.category in _COUNTED:
                counts[span.name] = counts.get(span.name, 0) + 1
                for table, value in ((own, span.own_us), (total, span.duration_us)):
                    row = table.setdefault(span.name, {})
                    row[rank] = row.get(rank, 0.0) + value / 1000
    merged = [
        OperationTime(name=name, count=count, own_ms=own[name], total_ms=total[name])
        for name, count in counts.items()
    ]
    return sorted(merged, key=lambda one: (-one.mean_own_ms, one.name))


def read_traces(directory: Path | str) -> dict[int, list[Mapping[str, Any]]]:
    """Return the events of each rank's traces that `profile` wrote; those of several cycles are joined.

    FileNotFoundError if the directory holds no trace.
    """
    found: dict[int, list[Mapping[str, Any]]] = {}
    for file in sorted(Path(directory).glob("trace-rank-*.json")):
        if match := _RANK.fullmatch(file.name):
            events = cast("list[Mapping[str, Any]]", json.loads(file.read_text())["traceEvents"])
            found.setdefault(int(match[1]), []).extend(events)
    if not found:
        raise FileNotFoundError(
            f"{Path(directory)} holds no trace-rank-RANK.json: pass the directory that profile() wrote to"
        )
    return found


def operation_table(operations: Sequence[OperationTime], *, limit: int = 20) -> str:
    """Return a text table of operations: mean own time, own time on the slowest rank, and number of calls."""
    rows = [("operation", "mean ms", "slowest ms", "on rank", "calls")]
    rows += [
        (
            one.name[:60],
            f"{one.mean_own_ms:.3f}",
            f"{one.own_ms[one.slowest_rank]:.3f}",
            str(one.slowest_rank),
            str(one.count),
        )
        for one in operations[:limit]
    ]
    return format_table(rows, right=range(1, 5))
