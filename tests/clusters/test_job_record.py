import os
import stat
from pathlib import Path

import pytest

from drivetrain_clusters import ClusterError
from drivetrain_clusters.jobs.record import JobRecord, find_record, write_record
from requests_of_jobs import make_request


def record_of(job_id: str, folder: Path) -> JobRecord:
    request = make_request(
        log_dir=folder,
        environment={"A": "x\ny"},
        options={"image": "x,y"},
        time_limit_seconds=60,
        command=("drivetrain", "launch", "train.py", "none", "1", "a,b", ""),
    )
    return JobRecord(cluster="kubernetes", job_id=job_id, request=request)


@pytest.mark.parametrize("job_id", ["123", "team/train", "train-1@http://head:8265"])
def test_a_record_is_found_by_the_id_of_the_job(tmp_path: Path, job_id: str) -> None:
    record = record_of(job_id, tmp_path)
    path = write_record(record)
    assert path.parent == tmp_path
    assert find_record(job_id, tmp_path) == record


def test_only_its_owner_reads_a_record(tmp_path: Path) -> None:
    assert stat.S_IMODE(write_record(record_of("1", tmp_path)).stat().st_mode) == 0o600


def test_an_unknown_job_names_the_nearest_and_all(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="has no record of it; --log-dir names another folder"):
        find_record("1", tmp_path)
    write_record(record_of("1234", tmp_path))
    with pytest.raises(ClusterError, match="did you mean 1234; there are 1234"):
        find_record("1235", tmp_path)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"cluster": "x"}', '{"cluster": 1, "job_id": "1", "request": {}}']
)
def test_a_record_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.job.json").write_text(text)
    with pytest.raises(ClusterError, match=r"x\.job\.json: is no record of a job that can be read"):
        find_record("1", tmp_path)


@pytest.mark.parametrize("levels", [102, 50_000])
def test_a_record_that_is_nested_too_deeply_is_named(tmp_path: Path, levels: int) -> None:
    (tmp_path / "x.job.json").write_text("[" * levels + "]" * levels)
    with pytest.raises(ClusterError, match=r"x\.job\.json: is no record .* is nested too deeply"):
        find_record("1", tmp_path)


def test_a_pipe_in_place_of_a_record_is_named_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.job.json")
    with pytest.raises(ClusterError, match=r"x\.job\.json: is no record .* is no regular file"):
        find_record("1", tmp_path)
