import pytest

from drivetrain_clusters import ClusterError
from drivetrain_clusters.kubernetes.cluster import Kubernetes
from drivetrain_clusters.kubernetes.manifest import jobset_manifest
from drivetrain_clusters.kubernetes.options import read_kubernetes_options
from requests_of_jobs import make_request

KUBEFLOW = {
    "PET_NNODES": "4",
    "PET_NODE_RANK": "3",
    "PET_MASTER_ADDR": "bert-master-0",
    "PET_MASTER_PORT": "23456",
    "PET_NPROC_PER_NODE": "8",
    "MASTER_ADDR": "bert-master-0",
    "MASTER_PORT": "23456",
}


def environment_of_pod(index: int, restarts: str = "0", **changes: object) -> dict[str, str]:
    """The variables of a pod of our manifest, with those that Kubernetes fills in."""
    request = make_request(options={"image": "x"}, **changes)
    manifest = jobset_manifest(request, read_kubernetes_options(request))
    pod = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    variables = {each["name"]: each.get("value", restarts) for each in pod["containers"][0]["env"]}
    return {**variables, "JOB_COMPLETION_INDEX": str(index), "KUBERNETES_SERVICE_HOST": "10.0.0.1"}


def test_a_pod_of_our_manifest_knows_its_place() -> None:
    place = Kubernetes().placement(environment_of_pod(1, restarts="2"))
    assert place is not None
    assert (place.cluster, place.job_id, place.restart_count) == ("kubernetes", "train", 2)
    assert (place.num_nodes, place.node_rank, place.num_tasks, place.task_rank) == (2, 1, 2, 1)
    assert (place.master_addr, place.master_port) == ("train-node-0-0.train", 29500)
    assert (place.tasks_per_node, place.local_task, place.devices) == (1, 0, None)
    assert not place.is_one_task_per_rank
    assert place.sources["node_rank"] == "JOB_COMPLETION_INDEX"


def test_a_pod_alone_meets_itself() -> None:
    place = Kubernetes().placement(environment_of_pod(0, num_nodes=1))
    assert place is not None
    assert (place.num_nodes, place.master_addr) == (1, "127.0.0.1")


def test_a_pod_of_kubeflow_knows_its_place() -> None:
    place = Kubernetes().placement({**KUBEFLOW, "JOB_COMPLETION_INDEX": "3"})
    assert place is not None
    assert (place.job_id, place.num_nodes, place.node_rank) == ("bert", 4, 3)
    assert (place.master_addr, place.master_port) == ("bert-master-0", 23456)


def test_a_pod_of_an_older_pytorchjob_knows_its_place() -> None:
    given = {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "HOSTNAME": "bert-worker-0",
        "WORLD_SIZE": "2",
        "RANK": "1",
        "MASTER_ADDR": "bert-master-0",
        "MASTER_PORT": "23456",
    }
    place = Kubernetes().placement(given)
    assert place is not None
    assert (place.job_id, place.num_nodes, place.node_rank) == ("bert", 2, 1)
    assert Kubernetes().placement({**given, "LOCAL_RANK": "0"}) is None
    assert Kubernetes().placement({**given, "HOSTNAME": "elsewhere"}) is None


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {
            "JOB_COMPLETION_INDEX": "3",
            "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        },  # each index may be a run of its own
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        {**KUBEFLOW, "PET_NNODES": "1:4"},  # elastic: the nodes agree on their ranks
    ],
)
def test_other_environments_are_no_place(environment: dict[str, str]) -> None:
    assert Kubernetes().placement(environment) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"JOB_COMPLETION_INDEX": None},
            "JOB_COMPLETION_INDEX: not set in this pod, but DRIVETRAIN_KUBERNETES_JOB is",
        ),
        ({"JOB_COMPLETION_INDEX": "2"}, "JOB_COMPLETION_INDEX=2: contradicts DRIVETRAIN_KUBERNETES_NODES=2"),
        ({"JOB_COMPLETION_INDEX": "-1"}, "JOB_COMPLETION_INDEX='-1': must be an integer"),
        ({"DRIVETRAIN_KUBERNETES_NODES": "two"}, "DRIVETRAIN_KUBERNETES_NODES='two': must be an integer"),
        ({"DRIVETRAIN_KUBERNETES_PORT": "70000"}, "must be a port"),
        ({"DRIVETRAIN_KUBERNETES_MASTER": ""}, "DRIVETRAIN_KUBERNETES_MASTER is empty"),
        ({"DRIVETRAIN_KUBERNETES_RESTARTS": "x"}, "DRIVETRAIN_KUBERNETES_RESTARTS='x': must be an integer"),
    ],
)
def test_variables_of_our_manifest_that_contradict(changes: dict[str, str | None], message: str) -> None:
    merged = {**environment_of_pod(0), **changes}
    with pytest.raises(ClusterError, match=message):
        Kubernetes().placement({name: text for name, text in merged.items() if text is not None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"JOB_COMPLETION_INDEX": "1"}, "PET_NODE_RANK=3 contradicts JOB_COMPLETION_INDEX=1"),
        ({"MASTER_ADDR": "other"}, "PET_MASTER_ADDR=bert-master-0 contradicts MASTER_ADDR=other"),
        ({"PET_NODE_RANK": "4"}, "PET_NODE_RANK=4: contradicts PET_NNODES=4"),
        (
            {"PET_MASTER_ADDR": None, "MASTER_ADDR": None},
            "PET_MASTER_ADDR or MASTER_ADDR: not set in this pod",
        ),
    ],
)
def test_variables_of_kubeflow_that_contradict(changes: dict[str, str | None], message: str) -> None:
    merged = {**KUBEFLOW, **changes}
    with pytest.raises(ClusterError, match=message):
        Kubernetes().placement({name: text for name, text in merged.items() if text is not None})


def test_the_jobset_itself_requeues() -> None:
    place = Kubernetes().placement(environment_of_pod(0))
    assert place is not None
    assert Kubernetes().requeue(place) is False
