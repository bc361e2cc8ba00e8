from dataclasses import replace

import pytest

from drivetrain_doctor.checked_run import CheckedRun
from drivetrain_doctor.host.processors import (
    ProcessorMeasurement,
    judge_processors,
    measure_processors,
)

EIGHT = ProcessorMeasurement(cores=8, usable=8)


@pytest.mark.parametrize(
    ("changes", "checked", "whats"),
    [
        ({}, {}, []),
        ({}, {"processes_per_node": 16}, ["16 ranks share 8 cores"]),
        ({"usable": 1}, {}, ["2 ranks share 1 core"]),
        ({"quota": 1.5}, {}, ["2 ranks share 1.5 cores"]),
        (
            {"usable": 2}, {"num_workers": 8},
            ["18 processes (ranks and DataLoader workers) share 2 cores"],
        ),
        (
            {"quota": 4}, {"processes_per_node": 1},
            ["the control group allows the time of 4 cores, and torch sees 8 cores"],
        ),
        ({"quota": 4}, {"processes_per_node": 1, "environment": {"OMP_NUM_THREADS": "4"}}, []),
        ({"load": 13.0}, {}, ["the machine is busy: 13.0 threads want to run on 8 cores"]),
    ],
)  # fmt: skip
def test_a_binding_or_a_quota_counts_and_not_the_machine(
    changes: dict[str, float], checked: dict[str, object], whats: list[str]
) -> None:
    run = CheckedRun(**{"processes_per_node": 2, "num_workers": 2, **checked})  # type: ignore[arg-type]
    findings = judge_processors(replace(EIGHT, **changes), run).findings  # type: ignore[arg-type]
    assert [finding.what for finding in findings] == whats


def test_workers_that_do_not_fit_are_told_how_many_do() -> None:
    run = CheckedRun(processes_per_node=2, num_workers=8)
    (finding,) = judge_processors(replace(EIGHT, usable=2), run).findings
    assert finding.repair.startswith(
        "set num_workers=1 in the DataLoader, or request more (sbatch --cpus-per-task"
    )


def test_this_machine_has_cores() -> None:
    assert measure_processors().effective > 0
