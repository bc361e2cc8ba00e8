"""Real clusters on loopback, shared by the tests of a module: Slurm, Open MPI and Ray."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from ray_cluster import LocalRay, ray_cluster
from slurm_cluster import SlurmCluster, missing_commands, slurm_cluster

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """Start a cluster of three nodes, and stop it after the module."""
    if missing := missing_commands():
        pytest.skip(f"{', '.join(missing)} not installed: apt-get install slurm-wlm")
    with slurm_cluster() as cluster:
        yield cluster


@pytest.fixture
def commands(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test's process call the cluster's commands."""
    for name, text in slurm.variables.items():
        monkeypatch.setenv(name, text)


@pytest.fixture
def in_slurm(slurm: SlurmCluster, tmp_path: Path) -> Run:
    """Run a command in `tmp_path` with the cluster's variables, to its end."""
    return partial(_run, tmp_path, dict(slurm.variables))


@pytest.fixture(scope="module")
def local_ray() -> Iterator[LocalRay]:
    """Start a cluster of two nodes, and stop it after the module."""
    pytest.importorskip("ray")
    with ray_cluster() as cluster:
        yield cluster


@pytest.fixture
def mpirun(tmp_path: Path) -> Run:
    """Run a command under Open MPI's mpirun in `tmp_path`, to its end."""
    if shutil.which("mpirun.openmpi") is None:
        pytest.skip("mpirun.openmpi not installed: apt-get install openmpi-bin")
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return partial(_run, tmp_path, allowed, "mpirun.openmpi", "--oversubscribe")


def _run(
    folder: Path, variables: dict[str, str], *words: str, seconds: float = 150
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
