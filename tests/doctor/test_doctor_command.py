"""`drivetrain doctor` as a user calls it on one host; tests/doctor/test_hosts.py has several."""

import json
import re
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster_jobs import slurm_job


def findings(checks: list[dict]) -> list[tuple[str, str]]:  # type: ignore[type-arg]
    return [(each["severity"], each["what"]) for check in checks for each in check["findings"]]


@pytest.mark.slow
def test_a_host_with_faults_names_each_with_its_repair_and_exits_with_1(
    drivetrain: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        done = drivetrain(
            "doctor", "--cpu", "--num-processes", "1", "--master-port", str(port), "--batch-megabytes", "1e9",
            environment={"GLOO_SOCKET_IFNAME": "nowhere0", "TMPDIR": str(tmp_path)},
        )  # fmt: skip
    assert done.returncode == 1, done.stderr
    for text in (
        "error    variables",
        "GLOO_SOCKET_IFNAME=nowhere0 names no interface of this host",
        "repair: export GLOO_SOCKET_IFNAME=INTERFACE",
        f"error: port {port} is in use",
        "and this run needs",
        "skipped  gloo between ranks  needs two ranks",
        "a run will break",
    ):
        assert text in done.stdout
    assert "drivetrain: doctor: checkpoint disk\n" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--num-nodes", "3"), r"launch\.num_nodes=3 .* contradicts the job that slurm started, which has 2"),
        (("--folder", __file__), "this is a file; name the folder of the checkpoints"),
        (("--folder", "missing/checkpoints"), "neither this folder nor its parent exists"),
    ],
)
def test_what_cannot_be_checked_is_an_error_before_anything_is_measured(
    drivetrain: Callable[..., subprocess.CompletedProcess[str]], flags: tuple[str, str], message: str
) -> None:
    done = drivetrain("doctor", "--cpu", *flags, environment=slurm_job((1, 1))[0])
    assert done.returncode == 2, done.stdout
    assert re.search(message, done.stderr), done.stderr
    assert done.stdout == ""


def test_two_ranks_are_measured_and_json_holds_the_numbers(
    drivetrain_with_torch: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = drivetrain_with_torch("doctor", "--cpu", "--num-processes", "2", "--json")
    report = json.loads(done.stdout)
    (host,) = report["hosts"]
    states = {check["name"]: check["state"] for check in host["checks"]}
    assert states["gloo between ranks"] == "ok", done.stdout
    assert states["port"] == "ok"
    assert (report["num_nodes"], report["num_processes"], report["together"]) == (1, 2, [])
    assert done.returncode == int(any(severity == "error" for severity, _ in findings(host["checks"])))
    assert report["is_broken"] is (done.returncode == 1)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--num-workers", "-1"), "--num-workers -1: 0 or more is allowed"),
        (("--wait-seconds", "0"), "--wait-seconds 0.0: a number of seconds above 0 is allowed"),
        (("--num-nodes", "2"), "--num-nodes 2: say on every node where they meet, --master-addr HOST"),
        (("train.py",), "'train.py': not expected here"),
    ],
)
@pytest.mark.slow
def test_impossible_requests_are_refused(drivetrain: Callable, arguments: tuple[str, ...], told: str) -> None:
    done = drivetrain("doctor", *arguments)
    assert (done.returncode, told in done.stderr) == (2, True), done.stderr


CLUSTER = """
from drivetrain_clusters.protocol import JobPlacement


class Cluster:
    def placement(self, environment):
        if "PLAYED_TASK" not in environment:
            return None
        task = int(environment["PLAYED_TASK"])
        return JobPlacement(
            cluster="played", job_id="7", num_nodes=1, node_rank=0, tasks_per_node=2, local_task=task, num_tasks=2,
            task_rank=task, master_addr="127.0.0.1", master_port=31007,
        )
"""


@pytest.mark.slow
def test_inside_a_clusters_job_the_first_task_of_a_host_checks_for_all(
    drivetrain_with_torch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    packages = tmp_path / "packages"
    announced = packages / "played-1.0.dist-info"
    announced.mkdir(parents=True)
    (announced / "entry_points.txt").write_text("[drivetrain.clusters]\nplayed = played:Cluster\n")
    (announced / "METADATA").write_text("Metadata-Version: 2.1\nName: played\nVersion: 1.0\n")
    (packages / "played.py").write_text(CLUSTER)
    job = {"PYTHONPATH": str(packages)}
    second = drivetrain_with_torch("doctor", "--cpu", environment={**job, "PLAYED_TASK": "1"})
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    first = drivetrain_with_torch("doctor", "--cpu", environment={**job, "PLAYED_TASK": "0"})
    assert first.stdout.startswith("drivetrain doctor: 1 host, 2 processes, "), first.stderr
    assert "1 pair: " in first.stdout
