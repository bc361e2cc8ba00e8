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


def test_what_a_batch_needs_is_computed() -> None:
    # 2 ranks x (4 workers x 2 prefetched + 1 in use) x 10 MB
    assert needed_bytes(replace(ASKED, batch_bytes=10_000_000)) == 180_000_000
    assert needed_bytes(replace(ASKED, batch_bytes=10_000_000, num_workers=0)) == 0
    assert needed_bytes(replace(ASKED, accelerator="cuda")) == 2 * (32 << 20)


def test_dockers_64_megabytes_are_a_warning_without_a_batch_and_an_error_with_a_large_one() -> None:
    (finding,) = judge_shared_memory(DOCKER, ASKED).findings
    assert finding.severity == "warning"
    assert finding.what == "/dev/shm has 67.11 MB free of 67.11 MB, as Docker gives it"
    assert "docker run --shm-size=8g" in finding.mend
    (finding,) = judge_shared_memory(DOCKER, replace(ASKED, batch_bytes=10_000_000)).findings
    assert finding.severity == "error"
    assert finding.what == "/dev/shm has 67.11 MB free of 67.11 MB, and this run fills 180.00 MB"
    assert "2 ranks x 4 workers x 2 prefetched batches" in finding.why


def test_dockers_64_megabytes_suffice_for_a_small_batch() -> None:
    assert judge_shared_memory(DOCKER, replace(ASKED, batch_bytes=1_000_000)).findings == ()


def test_no_workers_need_none() -> None:
    assert judge_shared_memory(DOCKER, replace(ASKED, num_workers=0)).skipped is not None


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    verdict = judge_shared_memory(measure_shared_memory(tmp_path / "shm"), ASKED)
    assert [finding.severity for finding in verdict.findings] == ["error"]
    assert "is not there" in verdict.findings[0].what


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_large_one_is_fine(ranks: int) -> None:
    large = replace(DOCKER, size_bytes=64 << 30, free_bytes=64 << 30)
    assert judge_shared_memory(large, replace(ASKED, processes_per_node=ranks)).findings == ()
