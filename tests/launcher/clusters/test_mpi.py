"""Open MPI and MPICH themselves, on loopback: mpirun with one rank a node and one task a rank."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.mpi.cluster import Mpi
from drivetrain_clusters.protocol import JobRequest

LAUNCH = (sys.executable, "-m", "drivetrain_launcher", "launch", "--cpu")
SHOW = """
import sys
from drivetrain_state import connect, reduce
import torch
with connect(device="cpu") as context:
    place = context.topology
    total = int(reduce(context, torch.tensor(place.rank + 1)))
    # One write, which the lines of other tasks do not cut.
    sys.stdout.write(
        f"rank {place.rank} {place.local_rank} of {place.world_size} {place.local_world_size} sum {total}\\n"
    )
"""


def ranks(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "\x1b" not in done.stdout + done.stderr
    )  # Open MPI gives each task a terminal, which is not the user's
    return sorted(re.findall(r"^(?:\[rank .*\] )?(rank \d.*)$", done.stdout, re.MULTILINE))


@pytest.mark.slow
def test_one_task_a_rank_runs_the_script_in_place(mpirun: Callable, script: Callable) -> None:
    script(SHOW)
    assert ranks(mpirun("-np", "3", *LAUNCH, "script.py")) == [
        f"rank {rank} {rank} of 3 3 sum 6" for rank in range(3)
    ]


@pytest.mark.slow
def test_one_task_starts_the_ranks_of_its_node(mpirun: Callable, script: Callable) -> None:
    script(SHOW)
    done = mpirun("-np", "1", *LAUNCH, "--processes-per-node", "2", "script.py")
    assert ranks(done) == [f"rank {rank} {rank} of 2 2 sum 3" for rank in range(2)]


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_job_with_its_code(mpirun: Callable, script: Callable) -> None:
    script("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(100)")
    assert mpirun("-np", "2", *LAUNCH, "script.py").returncode == 7


@pytest.mark.slow
@pytest.mark.parametrize("per_node", [1, 2], ids=["a task a node", "a task a rank"])
def test_hydras_nodes_meet_where_they_are_told(tmp_path: Path, script: Callable, per_node: int) -> None:
    """Two nodes, which Hydra takes 127.0.0.2 and 127.0.0.3 for; its launcher `fork` starts both here."""
    if shutil.which("mpiexec.mpich") is None:
        pytest.skip("mpiexec.mpich not installed: apt-get install mpich")
    script(SHOW)
    nodes = (
        "-hosts",
        "127.0.0.2,127.0.0.3",
        "-launcher",
        "fork",
        "-ppn",
        str(per_node),
        "-np",
        str(2 * per_node),
    )
    words = ("mpiexec.mpich", *nodes, *LAUNCH, "script.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    asked = {
        "cwd": tmp_path,
        "stdin": subprocess.DEVNULL,
        "capture_output": True,
        "text": True,
        "timeout": 150,
    }
    untold = subprocess.run(words, env=environment, check=False, **asked)
    assert "nothing tells the 2 nodes (PMI_SIZE and MPI_LOCALNRANKS) where node 0 is" in untold.stderr
    told = subprocess.run(words, env={**environment, "MASTER_ADDR": "127.0.0.2"}, check=False, **asked)
    total = sum(range(2 * per_node + 1))
    assert ranks(told) == [
        f"rank {rank} {rank % per_node} of {2 * per_node} {per_node} sum {total}"
        for rank in range(2 * per_node)
    ]


def test_there_is_no_queue_to_submit_to(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="mpirun starts a job at once and has no queue"):
        Mpi().plan(JobRequest(name="x", command=("x",), folder=tmp_path))
