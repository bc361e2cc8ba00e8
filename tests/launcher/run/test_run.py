"""What a launcher does for its job, with real processes and the commands of a cluster in a folder of their own."""

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cluster_jobs import hydra_job, slurm_job
from drivetrain_clusters.slurm.placement import slurm_placement
from drivetrain_launcher import LaunchError, LaunchPlan, LaunchTarget
from drivetrain_launcher.run.run import check_address, requeue_after
from processes import free_port


def plan_of(task: dict[str, str], **changes: object) -> LaunchPlan:
    place = slurm_placement(task)
    assert place is not None
    made = LaunchPlan(
        mode="elastic", target=LaunchTarget(name="x.py"), num_nodes=place.num_nodes, placement=place,
        master_addr=place.master_addr, shutdown_timeout_seconds=0.1,
    )  # fmt: skip
    return replace(made, **changes)


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Put the handler of SIGTERM back, which a launcher that ends replaces."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def slurm_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Put programs with the names of Slurm's first on PATH, which note what they are asked."""

    def write(state: str) -> Path:
        for name, body in (("squeue", f"echo {state}"), ("scontrol", "")):
            path = tmp_path / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f'#!/bin/sh\necho "{name} $*" >>{tmp_path}/asked\n{body}\n')
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        return tmp_path / "asked"

    return write


@pytest.mark.parametrize(
    ("state", "is_asked"),
    [("RUNNING 1 0", True), ("COMPLETING 1 0", True), ("RUNNING 0 0", False), ("", False)],
)
def test_task_0_alone_asks_slurm_for_a_job_that_may_run_again(
    slurm_commands: Callable[[str], Path], state: str, is_asked: bool
) -> None:
    asked = slurm_commands(state)
    tasks = slurm_job(job=7)
    assert [requeue_after(75, plan_of(task)) for task in tasks] == [75, 75]
    assert ("scontrol requeue 7" in asked.read_text()) == is_asked
    # Slurm shows a job that a user has cancelled as COMPLETING; it is found by the state that it will have.
    assert asked.read_text().count("squeue --noheader --states=RUNNING,SUSPENDED,TIMEOUT --jobs=7 ") == 1


@pytest.mark.parametrize("code", [0, 1, 143, None, "a message"])
def test_a_run_that_has_not_saved_is_not_started_again(
    slurm_commands: Callable[[str], Path], code: object
) -> None:
    asked = slurm_commands("RUNNING 1 0")
    assert requeue_after(code, plan_of(slurm_job()[0])) == (
        code if isinstance(code, int) else int(code is not None)
    )
    assert not asked.exists()


def test_a_job_is_started_again_as_often_as_allowed(
    slurm_commands: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = slurm_commands("RUNNING 1 0")
    plan = plan_of(slurm_job(SLURM_RESTART_COUNT="2")[0], max_requeues=2)
    assert requeue_after(75, plan) == 75
    assert not asked.exists()
    assert "started again 2 times, and max_requeues=2 allows no more" in capsys.readouterr().err


def test_a_refusal_is_said_and_keeps_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert requeue_after(75, plan_of(slurm_job()[0])) == 75
    assert (
        "was not put into the queue again: squeue: the command is not installed here"
        in capsys.readouterr().err
    )


def test_a_stop_while_a_launcher_waits_for_task_0_ends_the_wait() -> None:
    source = (
        "import os, signal, sys, threading, time; sys.path.insert(0, sys.argv[1])\n"
        "from cluster_jobs import slurm_job\n"
        "from drivetrain_launcher import LaunchPlan, LaunchTarget\n"
        "from drivetrain_clusters.slurm.placement import slurm_placement\n"
        "from drivetrain_launcher.run.run import requeue_after\n"
        "plan = LaunchPlan(mode='elastic', target=LaunchTarget(name='x'), \n"
        "                  placement=slurm_placement(slurm_job()[1]), shutdown_timeout_seconds=600)\n"
        "def end():\n"
        "    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL: time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "threading.Thread(target=end).start()\n"
        "sys.exit(requeue_after(75, plan))\n"
    )
    tests = str(Path(__file__).parents[2])
    assert subprocess.run([sys.executable, "-c", source, tests], timeout=120, check=False).returncode == 75


def test_a_host_that_does_not_resolve_is_named_with_its_variable_in_a_job() -> None:
    plan = plan_of(slurm_job(hosts=("no-such-host.invalid", "n2"))[1])
    why = r"node 0 is no-such-host.invalid, read from SLURM_STEP_NODELIST, but this node \(.*\) finds no address"
    with pytest.raises(LaunchError, match=why):
        check_address(plan, patience_seconds=0)
    outside = replace(plan, placement=None)
    why = r"node 0 is no-such-host.invalid, but .* finds no address.*or say --master-addr with an address of node 0"
    with pytest.raises(LaunchError, match=why):
        check_address(outside)


def test_a_jobs_node_is_waited_for_until_its_name_has_an_address(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find, asked = socket.getaddrinfo, []

    def not_yet(host: str, *arguments: object, **options: object) -> object:
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return find("127.0.0.1", *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(socket, "getaddrinfo", not_yet)
    monkeypatch.setattr("drivetrain_launcher.run.run._LOOK_SECONDS", 0.01)
    check_address(plan_of(slurm_job(MASTER_ADDR="train-0.workers")[0]))
    assert asked == ["train-0.workers"] * 4  # at last, whether the address is this machine's
    assert capsys.readouterr().err.count("has no address yet; waiting for it, 90 s at most") == 1


@pytest.mark.parametrize(("address", "is_said"), [("192.0.2.77", True), ("127.0.0.1", False)])
def test_node_0_says_if_its_address_is_another_machines(
    address: str, is_said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    check_address(plan_of(slurm_job(MASTER_ADDR=address)[0]))
    told = f"node 0 is {address}, read from MASTER_ADDR, but this machine"
    assert (told in capsys.readouterr().err) == is_said


def test_a_cluster_is_found_or_ignored(
    drivetrain: Callable, drivetrain_here: Callable, script: Callable
) -> None:
    script("import os\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'])")
    task = {**hydra_job(1, 2)[1], "MASTER_PORT": str(free_port())}
    assert drivetrain("launch", "script.py", environment=task).stdout == "1 2\n"
    assert drivetrain("launch", "--cluster", "none", "script.py", environment=task).stdout == "0 1\n"
    unknown = drivetrain_here("launch", "--cluster", "slrum", "script.py")
    assert "cluster slrum: no installed package provides it; did you mean slurm" in unknown.stderr


@pytest.mark.slow
def test_a_cluster_may_be_named(drivetrain: Callable, script: Callable) -> None:
    script("import os\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'])")
    task = {**hydra_job(1, 2)[1], "MASTER_PORT": str(free_port())}
    assert drivetrain("launch", "--cluster", "mpi", "script.py", environment=task).stdout == "1 2\n"
    assert drivetrain("launch", "--cluster", "slurm", "script.py", environment=task).stdout == "0 1\n"
