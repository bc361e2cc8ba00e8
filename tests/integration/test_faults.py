"""Checkpoints under faults; `--fault-rounds 200` plays more rounds than the few of every run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from processes import TESTS, rank_environment

DRILL = Path(__file__).with_name("drill.py")
# How many rounds must have met the fault at least: a disk is not always filled by what a round has left to save.
CASES = [
    ("kill", 1, 0.5), ("kill", 2, 0.5), ("flip", 2, 0.9), ("cut", 2, 0.9), ("raise", 1, 0.5), ("raise", 2, 0.5),
    ("full", 1, 0.2), ("full", 2, 0.2), ("twice", 1, 0.5), ("twice", 2, 0.5),
]  # fmt: skip


def can_mount(directory: Path) -> bool:
    """Whether a small disk can be made in memory."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(directory)], capture_output=True
    )
    if mounted.returncode == 0:
        subprocess.run(["umount", str(directory)], check=True)
    return mounted.returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("fault", "num_ranks", "least"), CASES)
def test_whatever_happens_a_run_goes_on_as_if_it_had_not(
    fault: str, num_ranks: int, least: float, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    if fault == "full" and not can_mount(tmp_path):
        pytest.skip("wants the right to mount a disk in memory")
    rounds = pytestconfig.getoption("--fault-rounds")
    command = [sys.executable, str(DRILL), fault, str(rounds), str(num_ranks), str(tmp_path), "0"]
    environment = rank_environment(0, 1, 0, {"PYTHONPATH": str(TESTS)})
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        del environment[name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["rounds"] == rounds
    assert said["faults"] >= least * rounds
