"""Slurm itself, on loopback: srun with one task a node and one task a rank, and jobs that save and start again."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.protocol import JobRequest, Submission
from drivetrain_clusters.slurm.cluster import Slurm

pytestmark = pytest.mark.timeout(
    600
)  # jobs wait in a queue, start twice, and share the cores with other tests

LAUNCH = (sys.executable, "-m", "drivetrain_launcher", "launch")
SHOW = """
import os
from drivetrain_state import connect, reduce
import torch
with connect(device="cpu") as context:
    place = context.topology
    total = int(reduce(context, torch.tensor(place.rank + 1)))
    print("rank", place.rank, place.local_rank, "of", place.world_size, place.local_world_size, "node",
          place.node_rank, place.num_nodes, "sum", total, os.environ["MASTER_ADDR"], flush=True)
"""
# As many steps as two ranks have batches; the signal comes while they go on.
TRAIN = """
import sys, time
from pathlib import Path
import torch
from drivetrain import Accelerator
from drivetrain_checkpoint import NoCheckpointError

folder, steps = Path(sys.argv[1]), 40
accelerator = Accelerator(cpu=True, project_dir=folder, seed=0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
rows = torch.arange(steps * 8.0).reshape(-1, 4) / steps
loader = torch.utils.data.DataLoader(rows, batch_size=1, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
try:
    step = accelerator.load_state()
    print("resumes at", step, flush=True)
except NoCheckpointError:
    step = 0
with accelerator:
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == 3:
            print("trains", flush=True)
        # Waits for the test's signal at its third step, once.
        while step == 3 and len(sys.argv) > 2 and not (folder / "told").exists():
            time.sleep(0.1)
        accelerator.save_if_due()
if accelerator.is_main_process:
    weights = {name: value.tolist() for name, value in accelerator.unwrap_model(model).state_dict().items()}
    (folder / "end.txt").write_text(f"{step} {weights}")
"""


def ranks(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(re.findall(r"^(?:\[rank .*\] )?(rank \d.*)$", done.stdout, re.MULTILINE))


@pytest.mark.slow
def test_one_task_a_node_starts_the_ranks_of_its_node(in_slurm: Callable, script: Callable) -> None:
    script(SHOW)
    done = in_slurm("srun", "-N2", "--ntasks-per-node=1", *LAUNCH, "--processes-per-node", "2", "script.py")
    assert ranks(done) == [
        f"rank {rank} {rank % 2} of 4 2 node {rank // 2} 2 sum 10 127.0.0.2" for rank in range(4)
    ]


@pytest.mark.slow
def test_one_task_a_node_agrees_on_ranks_where_ranks_may_restart(
    in_slurm: Callable, script: Callable
) -> None:
    script(SHOW)
    flags = ("--processes-per-node", "1", "--max-restarts", "1")
    done = in_slurm("srun", "-N2", "--ntasks-per-node=1", *LAUNCH, *flags, "script.py")
    assert [line.partition(" sum")[0] for line in ranks(done)] == [
        "rank 0 0 of 2 1 node 0 2", "rank 1 0 of 2 1 node 1 2"
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("distribution", ["block", "cyclic"])
def test_one_task_a_rank_runs_the_script_in_place(
    in_slurm: Callable, script: Callable, distribution: str
) -> None:
    script(SHOW)
    done = in_slurm(
        "srun", "-N2", "--ntasks-per-node=2", f"--distribution={distribution}", *LAUNCH, "script.py"
    )
    assert ranks(done) == [
        f"rank {rank} {rank % 2} of 4 2 node {rank // 2} 2 sum 10 127.0.0.2" for rank in range(4)
    ]


@pytest.mark.slow
def test_nodes_may_have_different_numbers_of_tasks(in_slurm: Callable, script: Callable) -> None:
    script(SHOW)
    done = in_slurm("srun", "-N2", "-n3", *LAUNCH, "script.py")
    assert ranks(done) == [
        "rank 0 0 of 3 2 node 0 2 sum 6 127.0.0.2",
        "rank 1 1 of 3 2 node 0 2 sum 6 127.0.0.2",
        "rank 2 0 of 3 1 node 1 2 sum 6 127.0.0.2",
    ]


@pytest.mark.slow
def test_the_shell_of_a_batch_job_is_one_process(
    in_slurm: Callable, script: Callable, tmp_path: Path
) -> None:
    script("import os\nprint('alone', os.environ['WORLD_SIZE'], flush=True)")
    launch = " ".join((*LAUNCH, "script.py"))
    (tmp_path / "job.sh").write_text(f"#!/bin/sh\n#SBATCH -N2 --ntasks-per-node=2 -o out.txt\n{launch}\n")
    assert in_slurm("sbatch", "--wait", "job.sh").returncode == 0
    assert (tmp_path / "out.txt").read_text() == "alone 1\n"


@pytest.mark.slow
def test_the_plan_shows_the_cluster_and_its_variables(in_slurm: Callable, script: Callable) -> None:
    script("")
    done = in_slurm("srun", "-N1", "--gpus-per-node=2", *LAUNCH, "--dry-run", "script.py")
    assert done.stdout.startswith("cluster slurm, job "), done.stderr
    for line in ("node_rank      0", "devices        0,1", "SLURM_STEP_NUM_TASKS", "CUDA_VISIBLE_DEVICES"):
        assert line in done.stdout


@pytest.mark.slow
def test_doctor_shows_both_hosts_of_a_step_in_the_table_of_host_0(in_slurm: Callable) -> None:
    doctor = (*LAUNCH[:-1], "doctor", "--cpu", "--wait-seconds", "90")
    done = in_slurm("srun", "-N2", "--ntasks-per-node=1", "--label", *doctor)
    lines = [line.partition(": ")[::2] for line in done.stdout.splitlines()]
    first, second = ("\n".join(text for task, text in lines if task == rank) for rank in ("0", "1"))
    assert first.startswith("drivetrain doctor: 2 hosts, 2 processes, "), done.stdout + done.stderr
    assert re.search("^ok +rendezvous +2 of 2 hosts joined at 127.0.0.2:", first, re.MULTILINE), first
    assert re.search("^ok +versions +2 hosts agree ", first, re.MULTILINE), first
    assert re.search("^ok +connections between hosts +2 of 2 connections ", first, re.MULTILINE), first
    assert second.endswith("The output of host 0 shows all hosts.")
    # What it finds is so: the address of host 0 is one of host 1 too, as both are this machine.
    assert re.findall("^error +(.*?)  ", first, re.MULTILINE) == ["addresses"], first
    own_address = "--master-addr 127.0.0.2 resolves to 127.0.0.2, which is this host itself [host 1 ("
    assert own_address in " ".join(first.split()), first  # the table breaks its lines at the terminal's width
    assert done.returncode == 1
    assert done.stderr.count("Exited with exit code 1\n") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slurm_flags", "flags", "why"),
    [
        (("-N2",), ("--num-nodes", "3"), "launch.num_nodes=3 (--num-nodes on the command line) contradicts the job "
         "that slurm started, which has 2 (SLURM_STEP_NUM_NODES)"),
        (("-N1", "--gpus-per-node=1"), ("--num-processes", "2"), "2 processes on this node (num_processes=2 from "
         "--num-processes on the command line, over 1 nodes), but slurm bound this task to 1 accelerators, "
         "CUDA_VISIBLE_DEVICES=0"),
        (("-N1", "-n2"), ("--max-restarts", "2"), "launch.max_restarts=2 (--max-restarts on the command line): slurm "
         "has started one task per rank, SLURM_STEP_NUM_TASKS=2"),
    ],
    ids=["nodes", "accelerators", "restarts"],
)  # fmt: skip
def test_a_flag_that_contradicts_the_job_names_both_sources(
    in_slurm: Callable, script: Callable, slurm_flags: tuple[str, ...], flags: tuple[str, ...], why: str
) -> None:
    script("")
    done = in_slurm("srun", *slurm_flags, *LAUNCH, *flags, "script.py")
    assert why in done.stderr
    assert done.returncode != 0


@pytest.mark.slow
def test_a_node_that_never_comes_is_named_with_its_host(
    in_slurm: Callable, script: Callable, tmp_path: Path
) -> None:
    script("")
    launch = " ".join((*LAUNCH, "--rdzv-timeout-seconds", "20", "--processes-per-node", "1", "script.py"))
    (tmp_path / "task.sh").write_text(f"[ $SLURM_NODEID = 1 ] && exec sleep 60\nexec {launch}\n")
    done = in_slurm("srun", "-N3", "--ntasks-per-node=1", "-K", "sh", "task.sh")
    assert "2 of 3 nodes came to 127.0.0.2:" in done.stderr
    assert "within 20 s" in done.stderr
    assert "Missing: node 1 (127.0.0.3)" in done.stderr


def request(folder: Path, *flags: str, **changes: object) -> JobRequest:
    command = (*LAUNCH, "--cpu", *flags)
    made = JobRequest(
        name="it's; touch owned", command=command, folder=folder, num_nodes=2, log_dir=folder / "logs"
    )
    return replace(made, **changes)


def submit(made: JobRequest) -> tuple[Submission, str]:
    submission = Slurm().plan(made)
    for path, text in submission.files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return submission, Slurm().submit(submission)


@pytest.mark.slow
@pytest.mark.usefixtures("commands")
def test_a_job_that_is_signalled_saves_is_requeued_and_ends_as_one_that_was_not(
    in_slurm: Callable, script: Callable, tmp_path: Path
) -> None:
    script(TRAIN)
    for name in ("whole", "halved"):
        (tmp_path / name).mkdir()
    done = in_slurm("srun", "-N2", *LAUNCH, "--cpu", "--processes-per-node", "1", "script.py", "whole")
    assert done.returncode == 0, done.stderr
    submission, job = submit(request(tmp_path, "--processes-per-node", "1", "script.py", "halved", "wait"))
    shown: list[str] = []
    teller = threading.Thread(target=_signal_once, args=(in_slurm, job, tmp_path / "halved", shown))
    teller.start()
    code = Slurm().follow(job, submission, shown.append)
    teller.join()
    output = "".join(shown)
    assert code == 0, output
    assert f"slurm job {job} is in the queue again" in output
    assert output.count("resumes at 3") == 2
    assert (tmp_path / "halved/end.txt").read_text() == (tmp_path / "whole/end.txt").read_text()
    assert not (tmp_path / "owned").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("commands")
def test_a_preempted_job_saves_and_goes_on_after_the_other(
    in_slurm: Callable, script: Callable, tmp_path: Path
) -> None:
    script(TRAIN)
    (tmp_path / "run").mkdir()
    made = request(
        tmp_path, "--processes-per-node", "1", "script.py", "run", "wait", options={"exclusive": ""}
    )
    submission, job = submit(replace(made, num_nodes=3))
    shown: list[str] = []

    def preempt() -> None:
        ends = time.monotonic() + 120
        while "".join(shown).count("trains") < 3 and time.monotonic() < ends:
            time.sleep(0.1)
        # The ranks wait at their third step until the signal, which comes with this job, has arrived.
        threading.Timer(8, (tmp_path / "run/told").touch).start()
        in_slurm("srun", "--partition=urgent", "-N3", "--exclusive", "true")

    teller = threading.Thread(target=preempt)
    teller.start()
    code = Slurm().follow(job, submission, shown.append)
    teller.join()
    output = "".join(shown)
    assert code == 0, output
    assert output.count("resumes at 3") == 3
    assert (tmp_path / "run/end.txt").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("commands")
def test_a_job_that_reaches_its_time_limit_is_told_by_slurm_saves_is_requeued_and_resumes(
    script: Callable, tmp_path: Path
) -> None:
    script(TRAIN)
    (tmp_path / "run").mkdir()
    # Slurm may send its signal a minute early: of two minutes, at least half a minute is left to start.
    made = request(
        tmp_path,
        *("--processes-per-node", "1", "script.py", "run", "wait"),
        time_limit_seconds=120,
        save_seconds=30,
        max_requeues=1,
    )
    submission, job = submit(made)
    shown: list[str] = []

    def write(text: str) -> None:
        shown.append(text)
        if "SIGTERM: stopping 1 ranks" in "".join(shown):
            threading.Timer(2, (tmp_path / "run/told").touch).start()

    code = Slurm().follow(job, submission, write)
    output = "".join(shown)
    assert code == 0, output
    before, _, after = output.partition(f"slurm job {job} is in the queue again")
    assert before.count("SIGTERM: saved at step 3;") == 1, output
    assert after.count("resumes at 3") == 2, output
    assert (tmp_path / "run/end.txt").read_text().startswith("40 ")


def _signal_once(run: Callable, job: str, folder: Path, shown: list[str]) -> None:
    """Send SIGTERM to the tasks of a job once both ranks train, as Slurm does before the time limit."""
    ends = time.monotonic() + 120
    while "".join(shown).count("trains") < 2 and time.monotonic() < ends:
        time.sleep(0.1)
    run("scancel", "--signal=TERM", job)
    time.sleep(2)
    (folder / "told").touch()


@pytest.mark.slow
@pytest.mark.usefixtures("commands")
def test_a_cancelled_job_is_not_put_into_the_queue_again(script: Callable, tmp_path: Path) -> None:
    script("import sys, time, signal\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
           "print('ready', flush=True)\ntime.sleep(100)")  # fmt: skip
    submission, job = submit(request(tmp_path, "--processes-per-node", "1", "script.py", num_nodes=1))
    shown: list[str] = []

    def write(text: str) -> None:
        if "ready" in text:
            Slurm().cancel(job)
        shown.append(text)

    code = Slurm().follow(job, submission, write)
    assert code != 0
    assert "in the queue again" not in "".join(shown)


@pytest.mark.slow
@pytest.mark.usefixtures("commands")
def test_the_exit_code_of_a_job_is_that_of_its_ranks(script: Callable, tmp_path: Path) -> None:
    script("import sys\nprint('ends', flush=True)\nsys.exit(7)")
    submission, job = submit(request(tmp_path, "--processes-per-node", "1", "script.py", num_nodes=1))
    shown: list[str] = []
    assert Slurm().follow(job, submission, shown.append) == 7
    assert "ends\n" in "".join(shown)
    with pytest.raises(ClusterError, match=f"job {job}: it has ended already, FAILED"):
        Slurm().cancel(job)


@pytest.mark.slow
@pytest.mark.usefixtures("commands")
def test_slurms_refusal_is_shown(tmp_path: Path) -> None:
    with pytest.raises(
        ClusterError, match=r"(?s)sbatch failed: .*invalid partition.*say --option partition="
    ):
        submit(request(tmp_path, "script.py", options={"partition": "nowhere"}))
    with pytest.raises(ClusterError, match=r"Slurm does not know (it|the job), or has forgotten"):
        Slurm().cancel("999999")


def test_a_command_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match="sbatch: the command is not installed here, or not on PATH"):
        submit(request(tmp_path, "script.py"))


@pytest.mark.parametrize("job", ["", "1; touch owned", "-1", "x"])
def test_an_id_that_is_no_number_reaches_no_command(job: str) -> None:
    with pytest.raises(ClusterError, match="Slurm numbers its jobs"):
        Slurm().cancel(job)


@pytest.mark.slow
@pytest.mark.usefixtures("commands")
def test_a_user_submits_follows_and_cancels(drivetrain: Callable, script: Callable, tmp_path: Path) -> None:
    """From another folder than the job's, and without `drivetrain` on the PATH of the nodes."""
    (tmp_path / "run").mkdir()
    script("import os, time\nprint('runs', os.getcwd(), os.environ['WORLD_SIZE'], flush=True)\ntime.sleep(600)",
           "run/train.py")  # fmt: skip
    environment = {name: os.environ[name] for name in ("SLURM_CONF", "PATH")}
    line = (
        "submit",
        "--on",
        "slurm",
        "--cpu",
        "--folder",
        "run",
        "--num-nodes",
        "2",
        "--processes-per-node",
        "1",
    )
    submitted = drivetrain(*line, "--no-follow", "train.py", environment=environment)
    assert submitted.returncode == 0, submitted.stderr
    job = submitted.stdout.strip()
    output = tmp_path / "logs" / f"train-{job}.out"
    deadline = time.monotonic() + 120
    while (output.read_text() if output.exists() else "").count("runs") < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert drivetrain("job", "cancel", job, environment=environment).returncode == 0
    followed = drivetrain("job", "follow", job, environment=environment)
    assert followed.returncode != 0
    assert followed.stdout.count(f"runs {tmp_path}/run 2\n") == 2, followed.stdout
    assert "it has ended already" in drivetrain("job", "cancel", job, environment=environment).stderr
