from dataclasses import replace
from pathlib import Path

import pytest

from drivetrain_doctor.checked_run import CheckedRun
from drivetrain_doctor.host.shared_memory_folder import (
    SharedMemoryMeasurement,
    judge_shared_memory,
    measure_shared_memory,
    needed_bytes,
)

DOCKER = SharedMemoryMeasurement(folder=Path("/dev/shm"), size_bytes=64 << 20, free_bytes=64 << 20)
ASKED = CheckedRun(processes_per_node=2, num_workers=4)


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({"batch_bytes": 10_000_000}, 180_000_000),  # 2 ranks x (4 workers x 2 prefetched + 1 in use) x 10 MB
        ({"batch_bytes": 10_000_000, "num_workers": 0}, 0),
        ({"accelerator": "cuda"}, 2 * (32 << 20)),
    ],
)
def test_what_a_batch_needs_is_computed(changes: dict[str, object], needed: int) -> None:
    assert needed_bytes(replace(ASKED, **changes)) == needed  # type: ignore[arg-type]


def test_dockers_64_megabytes_are_a_warning_without_a_batch_and_an_error_with_a_large_one() -> None:
    (finding,) = judge_shared_memory(DOCKER, ASKED).findings
    assert finding.severity == "warning"
    assert finding.what == "/dev/shm has 67.11 MB free of 67.11 MB, Docker's default"
    assert "docker run --shm-size=8g" in finding.repair
    (finding,) = judge_shared_memory(DOCKER, replace(ASKED, batch_bytes=10_000_000)).findings
    assert finding.severity == "error"
    assert finding.what == "/dev/shm has 67.11 MB free of 67.11 MB, and this run needs 180.00 MB"
    assert "2 ranks x 4 workers x 2 prefetched batches" in finding.why


@pytest.mark.parametrize("changes", [{}, {"processes_per_node": 8}])
def test_a_small_batch_or_a_large_folder_is_fine(changes: dict[str, int]) -> None:
    assert judge_shared_memory(DOCKER, replace(ASKED, batch_bytes=1_000_000)).findings == []
    large = replace(DOCKER, size_bytes=64 << 30, free_bytes=64 << 30)
    assert judge_shared_memory(large, replace(ASKED, **changes)).findings == []  # type: ignore[arg-type]


def test_no_workers_need_none() -> None:
    assert judge_shared_memory(DOCKER, replace(ASKED, num_workers=0)).is_skipped


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    (finding,) = judge_shared_memory(measure_shared_memory(tmp_path / "shm"), ASKED).findings
    assert (finding.severity, "does not exist" in finding.what) == ("error", True)
