"""Every cluster of the launcher passes the contract that a third party's would run."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from cluster_jobs import hydra_job, open_mpi_job, slurm_job
from drivetrain_launcher.clusters.local import Local
from drivetrain_launcher.clusters.mpi import Mpi
from drivetrain_launcher.clusters.protocol import Cluster, JobPlacement, JobRequest, Submission
from drivetrain_launcher.clusters.registry import cluster_names, make_cluster
from drivetrain_launcher.clusters.slurm import Slurm
from drivetrain_launcher.testing import ClusterContract


class SlurmContract(ClusterContract):
    def make(self) -> Cluster:
        return Slurm()

    def jobs(self) -> Sequence[Sequence[Mapping[str, str]]]:
        return (
            slurm_job(),
            slurm_job((2, 2)),
            slurm_job((3, 1, 2), step=4),
            slurm_job((1,), CUDA_VISIBLE_DEVICES="0"),
        )

    def request(self, directory: Path) -> JobRequest:
        return JobRequest(
            name="train", command=("drivetrain", "launch", "train.py"), folder=directory, num_nodes=2
        )

    def words(self, submission: Submission) -> tuple[str, ...]:
        (script,) = submission.files.values()
        return tuple(shlex.split(script, comments=True))


class MpiContract(ClusterContract):
    def make(self) -> Cluster:
        return Mpi()

    def jobs(self) -> Sequence[Sequence[Mapping[str, str]]]:
        return (open_mpi_job(), open_mpi_job(2, 2), hydra_job(), hydra_job(3, 1, MASTER_ADDR="head"))

    def request(self, directory: Path) -> None:
        return None


class LocalContract(ClusterContract):
    def make(self) -> Cluster:
        return Local()

    def jobs(self) -> Sequence[Sequence[Mapping[str, str]]]:
        return ([{"DRIVETRAIN_LOCAL_JOB_ID": "4242", "DRIVETRAIN_LOCAL_JOB_RESTARTS": "1"}],)

    def request(self, directory: Path) -> JobRequest:
        return JobRequest(name="train", command=("drivetrain", "launch", "train.py"), folder=directory)

    def words(self, submission: Submission) -> tuple[str, ...]:
        (script,) = submission.files.values()
        before, _, _ = script.rpartition(" &\n    child=")
        return tuple(shlex.split(before.partition("export DRIVETRAIN_LOCAL_JOB_RESTARTS=$restarts\n")[2]))


@pytest.mark.parametrize(
    "contract", [SlurmContract(), MpiContract(), LocalContract()], ids=["slurm", "mpi", "local"]
)
def test_a_cluster_passes_the_contract(contract: ClusterContract, tmp_path: Path) -> None:
    assert len(contract.check_all(tmp_path)) == 9


def test_the_clusters_are_installed() -> None:
    assert {"local", "mpi", "slurm"} <= set(cluster_names())
    assert isinstance(make_cluster("slurm"), Slurm)


class Careless(Slurm):
    """A cluster that counts every task as the first."""

    def placement(self, environment: Mapping[str, str]) -> JobPlacement | None:
        place = super().placement(environment)
        return (
            place
            if place is None
            else super().placement({**environment, "SLURM_NODEID": "0"} | _first(environment))
        )


def _first(environment: Mapping[str, str]) -> dict[str, str]:
    return {"SLURM_LOCALID": "0", "SLURMD_NODENAME": environment["SLURM_STEP_NODELIST"].split(",")[0]}


def test_the_contract_finds_tasks_with_the_same_rank(tmp_path: Path) -> None:
    class CarelessContract(SlurmContract):
        def make(self) -> Cluster:
            return Careless()

    with pytest.raises(AssertionError, match=r"the ranks of 2 tasks are \[0, 0\]"):
        CarelessContract().check_all(tmp_path)
