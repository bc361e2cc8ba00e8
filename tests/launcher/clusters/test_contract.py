"""Every cluster of the launcher passes the contract that a third party's would run."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster_jobs import hydra_job, open_mpi_job, slurm_job
from drivetrain_clusters.kubernetes.cluster import Kubernetes
from drivetrain_clusters.local.cluster import Local
from drivetrain_clusters.mpi.cluster import Mpi
from drivetrain_clusters.protocol import Cluster, JobPlacement, JobRequest, Submission
from drivetrain_clusters.ray.cluster import Ray
from drivetrain_clusters.ray.job import plan_ray
from drivetrain_clusters.ray.placement import ray_variables
from drivetrain_clusters.registry import cluster_names, make_cluster
from drivetrain_clusters.slurm.cluster import Slurm
from drivetrain_clusters.testing import ClusterContract
from drivetrain_clusters.tpu_pod.cluster import TpuPod
from ray_cluster import LocalRay
from requests_of_jobs import make_request

PLAYED_REMOTE_SHELL = Path(__file__).with_name("played_remote_shell.sh")


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
    runs_jobs = True

    def make(self) -> Cluster:
        return Local()

    def jobs(self) -> Sequence[Sequence[Mapping[str, str]]]:
        return ([{"DRIVETRAIN_LOCAL_JOB_ID": "4242", "DRIVETRAIN_LOCAL_JOB_RESTARTS": "1"}],)

    def request(self, directory: Path) -> JobRequest:
        return make_request(folder=directory, log_dir=directory / "logs", num_nodes=1)

    def words(self, submission: Submission) -> tuple[str, ...]:
        (script,) = submission.files.values()
        before, _, _ = script.rpartition(" &\n    child=")
        return tuple(shlex.split(before.partition("export DRIVETRAIN_LOCAL_JOB_RESTARTS=$restarts\n")[2]))


class TpuPodContract(ClusterContract):
    runs_jobs = True

    def make(self) -> Cluster:
        return TpuPod()

    def jobs(self) -> Sequence[Sequence[Mapping[str, str]]]:
        return [
            [
                {"TPU_WORKER_ID": str(n), "TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2,10.0.0.3"}
                for n in range(3)
            ]
        ]

    def request(self, directory: Path) -> JobRequest:
        options = {"hosts": "10.0.0.1", "remote_shell": str(PLAYED_REMOTE_SHELL)}
        return make_request(folder=directory, log_dir=directory / "logs", num_nodes=1, options=options)

    def words(self, submission: Submission) -> tuple[str, ...]:
        _, of_host = submission.files.values()
        return tuple(shlex.split(of_host.partition("</dev/null\n")[2].partition(" 3<&- &\n")[0]))


class KubernetesContract(ClusterContract):
    def make(self) -> Cluster:
        return Kubernetes()

    def jobs(self) -> Sequence[Sequence[Mapping[str, str]]]:
        kubeflow = {"PET_NNODES": "2", "PET_MASTER_ADDR": "bert-master-0", "PET_MASTER_PORT": "23456"}
        return (
            [self._pod(index, num_nodes=3) for index in range(3)],
            [self._pod(0, num_nodes=1)],
            [{**kubeflow, "PET_NODE_RANK": str(index)} for index in range(2)],
        )

    def request(self, directory: Path) -> JobRequest:
        return make_request(folder=directory, options={"image": "x"})

    def words(self, submission: Submission) -> tuple[str, ...]:
        (text,) = submission.files.values()
        return tuple(word.replace("$$", "$") for word in self._container(text)["command"])

    def _pod(self, index: int, *, num_nodes: int) -> dict[str, str]:
        """The variables of a pod of our manifest, with those that Kubernetes fills in."""
        (text,) = Kubernetes().plan(make_request(options={"image": "x"}, num_nodes=num_nodes)).files.values()
        given = {each["name"]: each.get("value", "0") for each in self._container(text)["env"]}
        return {**given, "JOB_COMPLETION_INDEX": str(index), "KUBERNETES_SERVICE_HOST": "10.0.0.1"}

    def _container(self, text: str) -> dict[str, Any]:
        (replicated,) = yaml.safe_load(text)["spec"]["replicatedJobs"]
        (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
        return container


class RayContract(ClusterContract):
    def make(self) -> Cluster:
        return Ray()

    def jobs(self) -> Sequence[Sequence[Mapping[str, str]]]:
        def node(rank: int, num_nodes: int, devices: Sequence[str]) -> dict[str, str]:
            job = {"job_id": "train-1", "num_nodes": num_nodes, "node_rank": rank, "restart_count": 1}
            place = {**job, "master_addr": "10.0.0.1", "master_port": 31007}
            return ray_variables(place, devices=devices)

        return ([node(rank, 3, ("0", "1")) for rank in range(3)], [node(0, 1, ())])

    def request(self, directory: Path) -> JobRequest:
        return make_request(folder=directory)

    def words(self, submission: Submission) -> tuple[str, ...]:
        return plan_ray(submission.request).request.command


@pytest.mark.parametrize(
    "contract",
    [SlurmContract(), MpiContract(), LocalContract(), TpuPodContract(), KubernetesContract(), RayContract()],
    ids=lambda contract: type(contract).__name__,
)
def test_a_cluster_passes_the_contract(contract: ClusterContract, tmp_path: Path) -> None:
    assert len(contract.check_all(tmp_path)) == 12


@pytest.mark.slow
@pytest.mark.usefixtures("commands")
def test_slurms_real_jobs_pass_the_contract(tmp_path: Path) -> None:
    class RealSlurmContract(SlurmContract):
        runs_jobs = True

        def request(self, directory: Path) -> JobRequest:
            return make_request(folder=directory, log_dir=directory / "logs")

    assert len(RealSlurmContract().check_all(tmp_path)) == 12


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:ssl=None is deprecated:DeprecationWarning")  # Ray 2.60 with aiohttp 3.14
def test_rays_real_jobs_pass_the_contract(local_ray: LocalRay, tmp_path: Path) -> None:
    class RealRayContract(RayContract):
        runs_jobs = True

        def request(self, directory: Path) -> JobRequest:
            return make_request(folder=directory, log_dir=directory / "logs", options=local_ray.options)

    assert len(RealRayContract().check_all(tmp_path)) == 12


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
