"""The place of a pod in its job, from the variables of our manifest or of Kubeflow. Pure."""

import re
from collections.abc import Mapping
from dataclasses import replace

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.job_variables import JobVariables, place_node
from drivetrain_clusters.protocol import JobPlacement

_CLUSTER = "kubernetes"
_PREFIX = "DRIVETRAIN_KUBERNETES_"
_INDEX = "JOB_COMPLETION_INDEX"
_OURS = {
    "job_id": "DRIVETRAIN_KUBERNETES_JOB",
    "num_nodes": "DRIVETRAIN_KUBERNETES_NODES",
    "master_addr": "DRIVETRAIN_KUBERNETES_MASTER",
    "master_port": "DRIVETRAIN_KUBERNETES_PORT",
    "restart_count": "DRIVETRAIN_KUBERNETES_RESTARTS",
    "node_rank": _INDEX,
}
# PyTorchJob and Trainer set torchrun's variables; the addresses also without the prefix.
_KUBEFLOW = {
    "num_nodes": ("PET_NNODES",),
    "node_rank": ("PET_NODE_RANK",),
    "master_addr": ("PET_MASTER_ADDR", "MASTER_ADDR"),
    "master_port": ("PET_MASTER_PORT", "MASTER_PORT"),
}
# PyTorchJob before it set torchrun's variables: ranks and sizes are those of pods, whose names say what they are.
_OLD_KUBEFLOW = {
    "num_nodes": "WORLD_SIZE",
    "node_rank": "RANK",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
}
_REPLICA = re.compile(r"(.+)-(?:master|worker)-[0-9]+", re.ASCII)
_FOLLOWING = re.compile(r"-(?:master-0|node-0-0(?:\..*)?)$")
_MANIFEST = "`drivetrain submit --on kubernetes --dry-run` prints a manifest that sets all of them"


def kubernetes_placement(environment: Mapping[str, str]) -> JobPlacement | None:
    """Return the place of this pod; None if no variables of a job tell where its nodes meet.

    The index of an indexed Job alone is no place: the pods of such a Job may be runs of their own.
    """
    if any(name.startswith(_PREFIX) for name in environment):
        needed = [name for field, name in _OURS.items() if field != "restart_count"]
        if missing := [name for name in needed if name not in environment]:
            given = next(name for name in environment if name.startswith(_PREFIX))
            raise ClusterError(f"{', '.join(missing)}: not set in this pod, but {given} is; {_MANIFEST}")
        return _place(environment, job_id=environment[_OURS["job_id"]], names=_OURS)
    if "PET_NNODES" in environment and "PET_NODE_RANK" in environment:
        return _place_by_kubeflow(environment)
    replica = _REPLICA.fullmatch(environment.get("HOSTNAME", ""))
    # Of a process with a local rank, another launcher has set the ranks.
    is_rank = any(name in environment for name in ("LOCAL_RANK", "GROUP_RANK"))
    is_complete = all(name in environment for name in (*_OLD_KUBEFLOW.values(), "KUBERNETES_SERVICE_HOST"))
    if replica is not None and is_complete and not is_rank:
        return _place(environment, job_id=replica[1], names=_OLD_KUBEFLOW)
    return None


def _place_by_kubeflow(environment: Mapping[str, str]) -> JobPlacement | None:
    if ":" in environment["PET_NNODES"]:
        return None  # an elastic job: the nodes agree on their ranks, and torchrun's own flags say where
    names: dict[str, str] = {}
    for field, choices in _KUBEFLOW.items():
        given = [name for name in choices if name in environment]
        if not given:
            raise ClusterError(
                f"{' or '.join(choices)}: not set in this pod, but PET_NNODES={environment['PET_NNODES']} is; "
                "Kubeflow sets both"
            )
        names[field] = given[0]
        alike = [*given, *([_INDEX] if field == "node_rank" and _INDEX in environment else [])]
        for other in alike[1:]:
            if environment[other] != environment[given[0]]:
                raise ClusterError(
                    f"{given[0]}={environment[given[0]]} contradicts {other}={environment[other]}; unset one of them"
                )
    job_id = _FOLLOWING.sub("", environment[names["master_addr"]])
    return _place(environment, job_id=job_id, names=names)


def _place(environment: Mapping[str, str], *, job_id: str, names: Mapping[str, str]) -> JobPlacement:
    if not environment[names["master_addr"]]:
        raise ClusterError(f"{names['master_addr']} is empty; it must name the pod of node 0")
    read = JobVariables(_CLUSTER, environment)
    restarts = read.optional_integer(names["restart_count"]) if "restart_count" in names else None
    place = place_node(read, cluster=_CLUSTER, job_id=job_id, names=names, restart_count=restarts or 0)
    # A pod of one node needs no name, which its cluster may not resolve for itself.
    return replace(place, master_addr="127.0.0.1") if place.num_nodes == 1 else place
