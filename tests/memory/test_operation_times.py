from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_memory import merge_operations, operation_table, profile, read_traces
from drivetrain_memory.profiling.operation_times import nest


def event(name: str, start: float, duration: float, **more: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "cpu_op",
        "name": name,
        "ts": start,
        "dur": duration,
        "pid": 1,
        "tid": 1,
        **more,
    }


def test_own_time_leaves_out_inner_operations_and_ranks_are_merged() -> None:
    one = [event("linear", 0, 1000), event("mm", 100, 600), event("add", 800, 100)]
    two = [event("linear", 0, 3000), event("mm", 100, 2600), event("note", 0, 9, cat="ac2g")]
    rows = {row.name: row for row in merge_operations({0: one, 1: two})}
    assert list(rows) == ["mm", "linear", "add"]
    assert rows["mm"].own_ms == {0: 0.6, 1: 2.6}
    assert rows["linear"].own_ms == {0: pytest.approx(0.3), 1: pytest.approx(0.4)}
    assert (rows["mm"].slowest_rank, rows["mm"].count, rows["add"].own_ms) == (1, 2, {0: 0.1})
    assert operation_table(list(rows.values())).splitlines()[1].split() == ["mm", "1.600", "2.600", "1", "2"]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20), st.integers(0, 2)), max_size=30))
def test_every_call_is_nested_once_and_inner_calls_begin_within_their_caller(calls) -> None:
    spans = nest(
        [event(str(i), start, length, tid=thread) for i, (start, length, thread) in enumerate(calls)]
    )
    pending, names = [one for thread in spans.values() for one in thread], []
    while pending:
        span = pending.pop()
        names.append(span.name)
        assert all(span.start_us <= one.start_us < span.start_us + span.duration_us for one in span.inner)
        pending += span.inner
    assert sorted(names) == sorted(map(str, range(len(calls))))


def test_traces_that_were_written_are_read_by_rank(tmp_path: Path) -> None:
    for rank in (0, 1):
        with profile(tmp_path, rank=rank):
            torch.ones(64, 64) @ torch.ones(64, 64)
    traces = read_traces(tmp_path)
    assert sorted(traces) == [0, 1]
    assert any(row.name == "aten::mm" and row.count == 2 for row in merge_operations(traces))


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no trace-rank-RANK\.json: pass the directory"):
        read_traces(tmp_path)
