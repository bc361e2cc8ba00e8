import json
from pathlib import Path

import pytest
import torch

from drivetrain_memory import profile


def test_each_rank_leaves_a_chrome_trace(tmp_path: Path) -> None:
    for rank in (0, 1):
        with profile(tmp_path / "traces", rank=rank, record_shapes=True) as profiler:
            torch.ones(8, 8) @ torch.ones(8, 8)
        assert any(event.key == "aten::mm" for event in profiler.key_averages())
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == [
        "trace-rank-0.json",
        "trace-rank-1.json",
    ]
    trace = json.loads((tmp_path / "traces" / "trace-rank-0.json").read_text())
    assert any(event.get("name") == "aten::mm" for event in trace["traceEvents"])


def test_without_a_folder_the_profiler_alone_tells(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with profile(record_shapes=True, with_flops=True) as profiler:
        torch.ones(8, 8) @ torch.ones(8, 8)
    (product,) = [event for event in profiler.key_averages(True) if event.key == "aten::mm"]
    assert (product.input_shapes[:2], product.flops) == ([[8, 8], [8, 8]], 2 * 8**3)
    assert list(tmp_path.iterdir()) == []


# torch tells that a cycle's events are its own, which is what is asked for here.
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events at the end of each cycle:UserWarning")
def test_with_a_schedule_each_cycle_leaves_one(tmp_path: Path) -> None:
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=2)
    with profile(tmp_path, schedule=schedule) as profiler:
        for _ in range(4):
            torch.ones(2) + 1
            profiler.step()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace-rank-0.0.json", "trace-rank-0.1.json"]
