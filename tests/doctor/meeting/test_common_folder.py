from pathlib import Path

from drivetrain_doctor.checked_run import CheckedRun
from drivetrain_doctor.meeting.conduct import file_in, judge_folder

LABELS = {0: "host 0", 1: "host 1", 2: "host 2"}


def test_a_host_with_another_folder_is_named(tmp_path: Path) -> None:
    asked = CheckedRun(num_nodes=3, folder=tmp_path)
    (finding,) = judge_folder({1: True, 2: False}, LABELS, asked, is_writable=True).findings
    assert (finding.severity, finding.what) == (
        "warning",
        f"host 2: the folder {tmp_path} is not that of host 0",
    )
    assert judge_folder({1: True, 2: True}, LABELS, asked, is_writable=True).findings == ()
    assert "cannot write" in (judge_folder({}, LABELS, asked, is_writable=False).skipped or "")


def test_the_file_is_there_during_the_block_alone(tmp_path: Path) -> None:
    with file_in(tmp_path) as name:
        assert (tmp_path / name).exists()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_has_no_file(tmp_path: Path) -> None:
    with file_in(tmp_path / "gone") as name:
        assert name == ""
