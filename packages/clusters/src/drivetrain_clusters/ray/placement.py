"""The variables of a node of a job on Ray, which its driver sets and its launcher reads. Pure."""

from collections.abc import Mapping, Sequence

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.job_variables import JobVariables, place_node
from drivetrain_clusters.protocol import JobPlacement

_NAMES = {
    "job_id": "DRIVETRAIN_RAY_ID",
    "num_nodes": "DRIVETRAIN_RAY_NODES",
    "node_rank": "DRIVETRAIN_RAY_NODE_RANK",
    "master_addr": "DRIVETRAIN_RAY_MASTER",
    "master_port": "DRIVETRAIN_RAY_PORT",
    "restart_count": "DRIVETRAIN_RAY_RESTARTS",
}
_DEVICES = "DRIVETRAIN_RAY_DEVICES"


def ray_variables(place: Mapping[str, object], *, devices: Sequence[str]) -> dict[str, str]:
    """Return the variables that tell a launcher its place and the accelerators that Ray has bound to its task.

    `place` has the values of a `JobPlacement` from "job_id" to "restart_count", by the names that are read again.
    """
    variables = {name: str(place[field]) for field, name in _NAMES.items()}
    return {**variables, _DEVICES: ",".join(devices)} if devices else variables


def ray_placement(environment: Mapping[str, str]) -> JobPlacement | None:
    """Return the place of this launcher; None if no driver of ours has started it."""
    given = [name for name in _NAMES.values() if name in environment]
    if not given:
        return None
    if missing := [name for name in _NAMES.values() if name not in environment]:
        raise ClusterError(
            f"{', '.join(missing)}: not set, but {given[0]} is; `drivetrain submit --on ray` sets all of them"
        )
    read = JobVariables("ray", environment)
    devices = environment.get(_DEVICES)
    return place_node(
        read,
        cluster="ray",
        job_id=environment[_NAMES["job_id"]],
        names=_NAMES,
        restart_count=read.integer(_NAMES["restart_count"])[0],
        devices=tuple(devices.split(",")) if devices else None,
    )
