import subprocess
import sys
from dataclasses import replace

import pytest

from drivetrain_doctor.checked_run import CheckedRun
from drivetrain_doctor.host.limits import LimitMeasurement, judge_limits, measure_limits
from drivetrain_launcher.plan.control_groups import GroupLimits

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="limits are Unix's")

WIDE = LimitMeasurement(open_files=None, most_open_files=None, processes=None)
EIGHT = CheckedRun(processes_per_node=8)
JUDGE_HERE = (
    "from drivetrain_doctor.host.limits import judge_limits, measure_limits\n"
    "from drivetrain_doctor.checked_run import CheckedRun\n"
    "for found in judge_limits(measure_limits(), CheckedRun(processes_per_node=8)).findings:\n"
    "    print(found.severity, found.what, '|', found.repair)\n"
)


def whats(measured: LimitMeasurement, checked: CheckedRun = EIGHT) -> list[tuple[str, str]]:
    return [(finding.severity, finding.what) for finding in judge_limits(measured, checked).findings]


def test_no_limits_no_findings() -> None:
    assert whats(WIDE) == []


def test_low_limits_of_this_process_are_found() -> None:
    shell = f'ulimit -n 200 && exec {sys.executable} -c "$0"'
    done = subprocess.run(
        ["sh", "-c", shell, JUDGE_HERE], capture_output=True, text=True, timeout=60, check=True
    )
    assert "error at most 200 open files (ulimit -n) | as root write '* - nofile 65536'" in done.stdout


def test_files_are_an_error_below_what_the_store_needs_and_a_warning_below_what_workers_do() -> None:
    tight = replace(WIDE, open_files=1024, most_open_files=524288)
    assert whats(tight) == [("warning", "at most 1,024 open files (ulimit -n)")]
    assert judge_limits(tight, EIGHT).findings[0].repair == "ulimit -n 65536"
    assert whats(tight, replace(EIGHT, num_workers=0)) == []
    thousand = replace(EIGHT, num_nodes=128)
    assert whats(tight, replace(thousand, node_rank=0))[0][0] == "error"
    assert "about 3,328" in judge_limits(tight, replace(thousand, node_rank=0)).findings[0].why
    assert whats(replace(tight, open_files=8192), replace(thousand, node_rank=1)) == []


def test_a_hard_limit_is_raised_by_root_alone() -> None:
    repair = judge_limits(replace(WIDE, open_files=1024, most_open_files=1024), EIGHT).findings[0].repair
    assert "limits.conf" in repair
    assert "docker run --ulimit nofile=65536" in repair


TIGHT_GROUP = GroupLimits(pids=100, used_pids=20)
FULL_GROUP = GroupLimits(memory_bytes=8 << 30, used_bytes=7 << 30)


@pytest.mark.parametrize(
    ("limits", "spared", "severity", "what"),
    [
        ({"processes": 500, "running": 400}, {"is_root": True}, "error",
         "at most 500 processes and threads for this user (ulimit -u), and 400 run already"),
        ({"group": TIGHT_GROUP}, {"group": GroupLimits()}, "error",
         "at most 100 processes and threads in this control group (pids.max), and 20 run already"),
        ({"group": FULL_GROUP}, {"group": GroupLimits()}, "warning",
         "the control group has 1.07 GB free of 8.59 GB of memory"),
        ({"locked_bytes": 64 << 10, "has_infiniband": True}, {"has_infiniband": False}, "error",
         "a process may lock 65.54 kB of memory (ulimit -l), and this host has InfiniBand"),
    ],
)  # fmt: skip
def test_a_limit_binds_unless_the_host_is_spared(
    limits: dict[str, object], spared: dict[str, object], severity: str, what: str
) -> None:
    tight = replace(WIDE, **limits)  # type: ignore[arg-type]
    assert whats(tight) == [(severity, what)]
    assert whats(replace(tight, **spared)) == []  # type: ignore[arg-type]


def test_virtual_memory_matters_with_cuda_alone() -> None:
    tight = replace(WIDE, address_bytes=16 << 30)
    assert whats(tight) == []
    assert whats(tight, replace(EIGHT, accelerator="cuda")) == [
        ("error", "a process may reserve 17.18 GB of virtual memory (ulimit -v)")
    ]


def test_this_machines_limits_are_read() -> None:
    measured = measure_limits()
    assert measured.open_files is None or measured.open_files > 0
