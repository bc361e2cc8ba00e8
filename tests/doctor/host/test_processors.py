from dataclasses import replace

from drivetrain_doctor.checked_run import CheckedRun
from drivetrain_doctor.host.processors import (
    ProcessorMeasurement,
    judge_processors,
    measure_processors,
)

EIGHT = ProcessorMeasurement(cores=8, usable=8)


def whats(measured: ProcessorMeasurement, **asked: object) -> list[str]:
    checked = CheckedRun(**{"processes_per_node": 2, "num_workers": 2, **asked})  # type: ignore[arg-type]
    return [finding.what for finding in judge_processors(measured, checked).findings]


def test_enough_cores_have_no_finding() -> None:
    assert whats(EIGHT) == []


def test_more_ranks_than_cores() -> None:
    assert whats(EIGHT, processes_per_node=16) == ["16 ranks on 8 cores"]


def test_a_binding_or_a_quota_counts_and_not_the_machine() -> None:
    assert whats(replace(EIGHT, usable=1)) == ["2 ranks on 1 cores"]
    assert whats(replace(EIGHT, quota=1.5)) == ["2 ranks on 1.5 cores"]
    (finding,) = judge_processors(
        replace(EIGHT, usable=2), CheckedRun(processes_per_node=2, num_workers=8)
    ).findings
    assert finding.what == "18 processes (ranks and DataLoader workers) on 2 cores"
    assert finding.mend.startswith("num_workers=1 in the DataLoader, or request more (sbatch --cpus-per-task")


def test_a_quota_below_the_visible_cores_starts_too_many_threads() -> None:
    measured = replace(EIGHT, quota=4)
    (what,) = whats(measured, processes_per_node=1)
    assert what == "the control group grants 4 cores' time, but 8 cores are visible"
    assert whats(measured, processes_per_node=1, environment={"OMP_NUM_THREADS": "4"}) == []


def test_a_busy_machine() -> None:
    assert whats(replace(EIGHT, load=13.0)) == ["the machine is busy: 13.0 threads want to run on 8 cores"]


def test_this_machine_has_cores() -> None:
    assert measure_processors().effective > 0
