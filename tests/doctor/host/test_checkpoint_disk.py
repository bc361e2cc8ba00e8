from dataclasses import replace
from pathlib import Path

import pytest

from drivetrain_doctor.checked_run import CheckedRun
from drivetrain_doctor.host.checkpoint_disk import DiskMeasurement, judge_disk, measure_disk

GOOD = DiskMeasurement(folder=Path("/data"), kind="nfs4", free_bytes=1 << 40, bytes_per_second=1e9)
TWO = CheckedRun(num_nodes=2, node_rank=0)


def test_a_fast_shared_folder_has_no_finding() -> None:
    report = judge_disk(GOOD, TWO)
    assert (report.findings, report.summary) == ([], "nfs4, writes 1.00 GB/s, 1.10 TB free in /data")


def test_a_folder_of_this_machine_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    measured = measure_disk(CheckedRun(folder=tmp_path))
    assert measured.bytes_per_second is not None
    assert measured.bytes_per_second > 0
    assert measured.free_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_yet_is_judged_by_the_one_around_it(tmp_path: Path) -> None:
    new = tmp_path / "runs" / "new"
    measured = measure_disk(CheckedRun(folder=new))
    assert (measured.folder, measured.missing) == (tmp_path, new)
    assert measure_disk(CheckedRun(folder=tmp_path)).missing is None
    told = f"free in /data; {new} does not exist yet, so /data was measured"
    report = judge_disk(replace(GOOD, missing=new), TWO)
    assert (report.findings, report.summary.endswith(told)) == ([], True)


def test_the_type_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    folder = tmp_path / "a b" / "c"
    folder.mkdir(parents=True)
    inner = str(tmp_path / "a b").replace(" ", r"\040")
    mounts.write_text(f"1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 0:9 / {inner} rw shared:1 - nfs4 server:/x rw\n")
    assert measure_disk(CheckedRun(folder=folder), mounts).kind == "nfs4"


@pytest.mark.parametrize(
    ("changes", "found", "why"),
    [
        (
            {"bytes_per_second": None, "refusal": "Permission denied"},
            ("error", "writing into /data (nfs4) fails: Permission denied"),
            "the run fails at its first checkpoint",
        ),
        (
            {"free_bytes": 1_600_000_000}, ("warning", "only 1.60 GB free in /data"),
            "that of 100 million parameters fills it",
        ),
        (
            {"bytes_per_second": 10e6}, ("warning", "writing into /data reaches only 10.00 MB/s"), "take 27 min",
        ),
        ({"free_files": 3}, ("warning", "/data has room for only 3 more files (df -i)"), ""),
        ({"kind": "tmpfs"}, ("warning", "/data lies in memory (tmpfs)"), ""),
        ({"kind": "overlay"}, ("warning", "/data lies in the container's own layer (overlay)"), ""),
        ({"kind": "ext4"}, ("warning", "/data seems to lie on this host's own disk (ext4)"), ""),
    ],
)  # fmt: skip
def test_a_folder_that_is_slow_or_loses_hides_or_refuses_checkpoints(
    changes: dict[str, object], found: tuple[str, str], why: str
) -> None:
    (finding,) = judge_disk(replace(GOOD, **changes), TWO).findings  # type: ignore[arg-type]
    assert (finding.severity, finding.what) == found
    assert why in finding.why


def test_an_own_disk_is_right_for_one_host() -> None:
    assert judge_disk(replace(GOOD, kind="ext4"), CheckedRun()).findings == []
