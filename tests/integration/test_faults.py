"""Checkpoints under faults; `--fault-rounds 200` plays more rounds than the few of every run."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from processes import environment_alone, run_processes

# How many rounds must have met the fault at least: a disk is not always filled by what a round has left to save.
CASES = [
    *((fault, num_ranks, "usual", least) for num_ranks in (1, 2) for fault, least in (
        ("kill", 0.5), ("flip", 0.9), ("cut", 0.9), ("raise", 0.5), ("full", 0.2), ("twice", 0.5),
    )),
    ("kill", 2, "fsdp", 0.5),
]  # fmt: skip


def can_mount(directory: Path) -> bool:
    """Whether a small disk can be made in memory."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(directory)], capture_output=True
    )
    if mounted.returncode == 0:
        subprocess.run(["umount", str(directory)], check=True)
    return mounted.returncode == 0


@pytest.fixture
def play(pythons: tuple[str, ...]) -> Callable[..., dict[str, int]]:
    """Run a drill; how many rounds it played, and how many of them met the fault."""

    def run(script: str, *arguments: object) -> dict[str, int]:
        (done,) = run_processes(
            Path(__file__).with_name(script),
            *map(str, arguments),
            environments=[environment_alone()],
            timeout_seconds=3500,
            pythons=pythons,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("fault", "num_ranks", "backend", "least"), CASES)
def test_whatever_happens_a_run_goes_on_as_if_it_had_not(
    play: Callable,
    fault: str,
    num_ranks: int,
    backend: str,
    least: float,
    tmp_path: Path,
    pytestconfig: pytest.Config,
) -> None:
    if fault == "full" and not can_mount(tmp_path):
        pytest.skip("wants the right to mount a disk in memory")
    rounds = pytestconfig.getoption("--fault-rounds")
    said = play("drill.py", fault, rounds, num_ranks, tmp_path, 0, backend)
    assert said["rounds"] == rounds
    assert said["faults"] >= least * rounds
    assert said["trained"] >= 0.5 * rounds


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_killed_run_goes_on_with_other_ranks_where_its_data_ended(
    play: Callable, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    rounds = pytestconfig.getoption("--fault-rounds")
    said = play("resized_drill.py", rounds, tmp_path, 0)
    assert said["rounds"] == rounds
    assert said["faults"] >= 0.5 * rounds
    assert said["resized"] >= 0.5 * rounds
