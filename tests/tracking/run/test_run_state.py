import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain_tracking.spool.spool_reader import SpoolReader

# How a run ends -> the state in the last line of its log; None if it has no last line.
ENDS = {
    "ends": "finished",
    "raises": "failed",
    "raises in finally": "failed",
    "raises and is caught": "finished",
    "raises in a child": "failed",
    "within a handler": "finished",
    "exits with 0": "failed",
    "exits with 0 in finally": "finished",
    "exits with 3": "failed",
    "exits with 3 in finally": "failed",
    "exits in a fork": "finished",
    "forgets": "failed",
    "is interrupted": "killed",
    "is terminated": None,
    "is killed": None,
    "is gone": None,
}


@pytest.mark.slow
def test_the_log_says_how_a_run_ended_as_far_as_its_process_can(tmp_path: Path) -> None:
    program = [sys.executable, str(Path(__file__).with_name("run_ends.py"))]
    started = {
        way: subprocess.Popen(
            [*program, way, str(tmp_path / way)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for way in ENDS
    }
    told = {way: process.communicate(timeout=120)[1] for way, process in started.items()}
    found = {way: state_in(tmp_path / way / "log.jsonl") for way in ENDS}
    assert found == ENDS, told
    assert [way for way in ENDS if "the run was not ended: its platforms show it as failed" in told[way]] == [
        "exits with 0",
        "exits with 3",
        "forgets",
    ]


def state_in(log: Path) -> str | None:
    ends = [one.record for one in SpoolReader(log).read() if one.record.get("event") == "finish"]
    assert len(ends) < 2, "a run ends once"
    return ends[0].get("state", "finished") if ends else None
