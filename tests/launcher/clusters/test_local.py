"""Jobs on this machine, run for real: a shell, a command, signals."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.local.cluster import Local
from drivetrain_clusters.protocol import JobRequest, Submission


def submit(request: JobRequest) -> tuple[Submission, str]:
    submission = Local().plan(request)
    for path, text in submission.files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return submission, Local().submit(submission)


def request(folder: Path, source: str, *arguments: str, **changes: object) -> JobRequest:
    command = (sys.executable, "-S", "-c", source, *arguments)
    made = JobRequest(name="a job; $(touch owned)", command=command, folder=folder, log_dir=folder / "logs")
    return replace(made, **changes)


def follow(submission: Submission, job: str) -> tuple[int, str]:
    written: list[str] = []
    return Local().follow(job, submission, written.append), "".join(written)


def test_a_job_starts_again_after_a_save_and_its_words_reach_no_shell(tmp_path: Path) -> None:
    source = (
        "import os, sys; n = os.environ['DRIVETRAIN_LOCAL_JOB_RESTARTS']\n"
        "print(n, sys.argv[1:], os.environ['VALUE'], flush=True); sys.exit(75 if n < '2' else 7)"
    )
    words = ("$(touch owned)", "it's; touch owned", "a\nb")
    submission, job = submit(request(tmp_path, source, *words, environment={"VALUE": "`touch owned`"}))
    code, output = follow(submission, job)
    assert code == 7
    assert output == "".join(f"{n} {list(words)} `touch owned`\n" for n in (0, 1, 2))
    assert not (tmp_path / "owned").exists()


def test_a_job_starts_again_at_most_as_often_as_asked(tmp_path: Path) -> None:
    submission, job = submit(
        request(tmp_path, "print('starts', flush=True); raise SystemExit(75)", max_requeues=1)
    )
    assert follow(submission, job) == (75, "starts\nstarts\n")


def test_a_cancelled_job_saves_and_stays_ended(tmp_path: Path) -> None:
    source = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(75)))\n"
        "open('ready', 'w').close()\n"
        "time.sleep(100)"
    )
    submission, job = submit(request(tmp_path, source))
    ends = time.monotonic() + 60
    while not (tmp_path / "ready").exists() and time.monotonic() < ends:
        time.sleep(0.02)
    Local().cancel(job)
    assert follow(submission, job) == (75, "saved\n")
    with pytest.raises(ClusterError, match=f"job {job}: no job of this machine"):
        Local().cancel(job)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_nodes": 2}, "num_nodes=2: this machine is one node"),
        ({"memory_per_node": "1GB"}, "memory_per_node=1GB: this machine is not divided"),
        ({"options": {"partition": "gpu"}}, "options=partition: this machine is not divided"),
        ({"time_limit_seconds": 100}, "time_limit_seconds=100: leaves no time to train"),
        ({"command": ()}, "has no command"),
        ({"environment": {"a-b": ""}}, "'a-b' is no name of a variable"),
    ],
)
def test_what_this_machine_does_not_do_is_refused(
    tmp_path: Path, changes: dict[str, object], why: str
) -> None:
    with pytest.raises(ClusterError, match=f"local: .*{why}"):
        Local().plan(replace(request(tmp_path, ""), **changes))


@pytest.mark.parametrize("job", ["-1", "0", "1; id", ""])
def test_an_id_that_is_no_process_is_refused(job: str) -> None:
    with pytest.raises(ClusterError, match="the id of a job is the number of its process"):
        Local().cancel(job)


def test_a_number_that_another_program_has_by_now_is_left_alone() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as other:
        with pytest.raises(ClusterError, match="no job of this machine has this number"):
            Local().cancel(str(other.pid))
        assert other.poll() is None
        assert other.stdin is not None
        other.stdin.write(b"\n")
