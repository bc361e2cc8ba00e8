"""A real Ray cluster of two nodes on the loopback, to which `drivetrain submit` sends real jobs."""

import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from threading import Timer

import pytest

from drivetrain_clusters import ClusterError
from drivetrain_clusters.ray.cluster import Ray
from ray_cluster import LocalRay
from requests_of_jobs import TRAPS, make_request

TRAIN = """
import os, pathlib, signal, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, told = dist.get_rank(), []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
state = pathlib.Path("step.txt")
first = step = int(state.read_text()) if state.exists() else 0
print(f"rank {rank} of {dist.get_world_size()} starts at {first} with {sys.argv[2:]}", flush=True)
while step < int(sys.argv[1]):
    asked = torch.tensor([float(bool(told))])
    dist.all_reduce(asked)
    step += 1
    if rank == 0:
        state.write_text(str(step))
    if step == first + 5 and rank == 0:
        print("trains", flush=True)
    if asked.item():
        dist.destroy_process_group()
        sys.exit(75)
    time.sleep(0.1)
dist.destroy_process_group()
if rank == 0:
    print(f"done at {step}", flush=True)
"""


@pytest.fixture
def submitted(local_ray: LocalRay, started: Callable) -> Callable:
    """Start `drivetrain submit --on ray` for two nodes of one process."""
    nodes = ("--num-nodes", "2", "--processes-per-node", "1", "--cpu")

    def submit(*words: str) -> subprocess.Popen[str]:
        return started("submit", "--on", "ray", *nodes, *local_ray.flags, *words)

    return submit


def slow(test: Callable) -> Callable:
    """Mark a test that needs the cluster."""
    return pytest.mark.slow(pytest.mark.timeout(900)(test))


def wait_for(process: subprocess.Popen[str], text: str) -> list[str]:
    """The output up to a line that has a text."""
    assert process.stdout is not None
    seen: list[str] = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return seen
    raise AssertionError(f"{text!r} did not appear in {''.join(seen)}")


def rest_of(process: subprocess.Popen[str]) -> tuple[str, int]:
    assert process.stdout is not None
    guard = Timer(600, process.kill)
    guard.start()
    output = process.stdout.read()
    guard.cancel()
    return output, process.wait()


@slow
def test_two_nodes_train_together_and_get_their_arguments_as_they_are(
    submitted: Callable, script: Callable
) -> None:
    script(TRAIN, "train.py")
    output, code = rest_of(submitted("train.py", "6", "$HOME", "${PATH}", "`id`", "a'b\"c", "x\ny", ""))
    assert code == 0, output
    words = ["$HOME", "${PATH}", "`id`", "a'b\"c", "x\ny", ""]
    for rank in (0, 1):
        line = re.escape(f"rank {rank} of 2 starts at 0 with {words}\n")
        assert re.search(rf"\[node {rank}\] (\[rank {rank} .*\] )?{line}", output), output
    assert "[node 0] done at 6\n" in output


@slow
def test_the_exit_code_of_the_node_that_failed_first_is_kept(submitted: Callable, script: Callable) -> None:
    script(
        "import sys, time, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "if dist.get_rank() == 1: sys.exit(5)\n"
        "time.sleep(15)\n"
        "dist.barrier()\n",
        "train.py",
    )
    output, code = rest_of(submitted("train.py"))
    assert code == 5, output
    assert "starts again" not in output


@slow
def test_a_job_whose_node_is_lost_starts_again_and_resumes(
    local_ray: LocalRay, submitted: Callable, script: Callable
) -> None:
    script(TRAIN, "train.py")
    process = submitted("train.py", "400")
    wait_for(process, "trains")
    local_ray.replace_node()
    output, code = rest_of(process)
    assert code == 0, output
    assert "the job starts again, 1 of 3 times" in output
    assert "[node 0] done at 400\n" in output
    assert "starts at 0" not in output


@slow
def test_a_job_saves_before_the_end_of_its_time_and_resumes(submitted: Callable, script: Callable) -> None:
    script(TRAIN, "train.py")
    limits = ("--time", "100s", "--save-seconds", "30", "--max-requeues", "1")
    output, code = rest_of(submitted(*limits, "train.py", "100000"))
    assert code == 75, output
    assert "all ranks have saved; the job starts again, 1 of 1 times\n" in output
    assert "all ranks have saved; the job has started again 1 times, and does so no more\n" in output
    starts = re.findall(r"\[node 0\] rank 0 of 2 starts at (\d+) ", output)
    assert starts[0] == "0"
    assert int(starts[1]) > 0


@slow
def test_each_node_gets_the_accelerators_that_ray_bound_to_it(
    local_ray: LocalRay, started: Callable, script: Callable
) -> None:
    """Ray's GPUs are counts that a node is said to have: what it binds is told by variables."""
    script(
        "import os\n"
        "print('devices', os.environ['DRIVETRAIN_RAY_DEVICES'], os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\n",
        "show.py",
    )
    nodes = ("--num-nodes", "2", "--accelerators-per-node", "1")
    output, code = rest_of(started("submit", "--on", "ray", *nodes, *local_ray.flags, "show.py"))
    assert code == 0, output
    for rank in (0, 1):
        found = re.search(rf"\[node {rank}\] (?:\[rank {rank} .*\] )?devices (\d) (\d)\n", output)
        assert found is not None, output
        assert found[1] == found[2]


@slow
def test_ctrl_c_leaves_the_job_running_and_cancel_ends_it(
    submitted: Callable, script: Callable, drivetrain: Callable, tmp_path: Path
) -> None:
    script(TRAIN, "train.py")
    process = submitted("train.py", "100000")
    seen = "".join(wait_for(process, "trains"))
    process.send_signal(signal.SIGINT)
    output, code = rest_of(process)
    assert code == 130, output
    job = next(line.split()[3] for line in seen.splitlines() if "submitted job" in line)
    assert f"stopped following; job {job} goes on" in output
    cancelled = drivetrain("job", "cancel", job)
    assert cancelled.returncode == 0, cancelled.stderr
    followed = drivetrain("job", "follow", job)
    assert followed.returncode != 0
    assert "[node 0] trains\n" in followed.stdout
    assert "has ended already" in drivetrain("job", "cancel", job).stderr
    step = (tmp_path / "step.txt").read_text()
    assert "does not know it" in drivetrain("job", "cancel", f"x{job}", "--on", "ray").stderr
    assert (tmp_path / "step.txt").read_text() == step


@slow
def test_resources_that_the_cluster_does_not_have_are_named(submitted: Callable, script: Callable) -> None:
    script(TRAIN, "train.py")
    output, code = rest_of(submitted("--cpus-per-node", "99", "--option", "wait-seconds=3", "train.py", "1"))
    assert code == 2, output
    assert "no place for 2 x {'CPU': 99}; the cluster has" in output


@slow
@pytest.mark.parametrize("address", ["127.0.0.1:1", "http://127.0.0.1:1"])
def test_a_cluster_that_does_not_answer_is_named(
    drivetrain: Callable, script: Callable, address: str
) -> None:
    pytest.importorskip("ray")
    script(TRAIN, "train.py")
    # Ray would wait for half a minute.
    variables = {"RAY_ADDRESS": address, "RAY_py_gcs_connect_timeout_s": "2"}
    done = drivetrain("submit", "--on", "ray", "--cpu", "train.py", environment=variables)
    assert done.returncode == 2, done.stderr
    assert "Ray cannot be reached at the address of RAY_ADDRESS" in done.stderr
    assert "--option address=http://HOST:8265 names the cluster's dashboard" in done.stderr


def test_without_ray_the_error_names_the_extra(
    drivetrain: Callable, script: Callable, tmp_path: Path
) -> None:
    script("print(1)", "train.py")
    (tmp_path / "ray.py").write_text("raise ImportError('no ray')")
    line = ("submit", "--on", "ray", "--cpu")
    shown = drivetrain(*line, "--dry-run", "train.py", environment={"PYTHONPATH": str(tmp_path)})
    assert shown.returncode == 0, shown.stderr
    done = drivetrain(*line, "train.py", environment={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2
    assert "pip install 'drivetrain-clusters[ray]' brings it" in done.stderr


def test_a_plan_shows_the_job_and_says_who_must_see_the_folder() -> None:
    submission = Ray().plan(make_request(name="My $(run)"))
    (path,) = submission.files
    assert (path, submission.command) == (Path("logs/My-run.ray.json"), ())
    assert '"drivetrain",\n' in submission.files[path]
    assert "all nodes must see /workspace" in submission.notes[0]
    copied = Ray().plan(make_request(options={"upload": "true"}))
    assert "is copied to the nodes for each start" in copied.notes[0]


@pytest.mark.parametrize("trap", [*TRAPS[:8], "", "-1", "../x", "a/b", "a?x=1"])
def test_no_job_id_becomes_another_url(trap: str) -> None:
    for job_id in (trap, f"{trap}@http://127.0.0.1:1"):
        with pytest.raises(ClusterError, match="a job on ray is ID or ID@http://HOST:PORT"):
            Ray().cancel(job_id)
