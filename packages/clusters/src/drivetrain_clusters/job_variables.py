"""Read the variables of a job: integers, contradictions, a task's place, and a port for the job."""

from collections.abc import Mapping
from zlib import crc32

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.protocol import JobPlacement
from drivetrain_messages import list_some

# Below the ports that Linux gives to clients (32768 and above), and without torchrun's default, 29500. The number of
# ports is a prime, so that the ports of jobs with consecutive numbers differ.
_FIRST_PORT = 10000
_NUM_PORTS = 19391
_STEPS_APART = 13
_VISIBILITY = (
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "ASCEND_RT_VISIBLE_DEVICES",
)


class JobVariables:
    """The environment of a task in a job of a cluster, with errors that name a variable and its value."""

    def __init__(self, cluster: str, environment: Mapping[str, str]) -> None:
        self._cluster = cluster
        self._environment = environment

    def text(self, *names: str) -> tuple[str, str]:
        """Return the value and the name of the first variable that is set; a ClusterError if none is."""
        for name in names:
            if value := self._environment.get(name):
                return value, name
        others = [name for name in self._environment if name.startswith(names[0].split("_")[0])]
        raise ClusterError(
            f"{self._cluster}: {' or '.join(names)} is not set, but {list_some(sorted(others), most=4) or 'others'} "
            f"{'is' if len(others) == 1 else 'are'}: a task's environment was changed or copied from another "
            "process; pass it on whole, or say --cluster none and give the ranks with --node-rank"
        )

    def integer(self, *names: str, least: int = 0) -> tuple[int, str]:
        """Return the value and the name of the first variable that is set, as an integer of at least `least`."""
        text, name = self.text(*names)
        if not (text.isascii() and text.isdecimal()) or int(text) < least:
            raise ClusterError(f"{self._cluster}: {name}={text!r}: must be an integer of at least {least}")
        return int(text), name

    def optional_integer(self, name: str) -> int | None:
        """Return a variable as an integer; None if it is not set."""
        return self.integer(name)[0] if self._environment.get(name) else None

    def optional_text(self, name: str) -> str | None:
        """Return a variable; None if it is not set."""
        return self._environment.get(name) or None

    def show(self, *names: str) -> str:
        """Return variables with their values, for an error message."""
        return ", ".join(f"{name}={self._environment.get(name, '(unset)')}" for name in names)

    def contradict(self, why: str, *names: str) -> ClusterError:
        """Return the error for variables that contradict each other."""
        return ClusterError(
            f"{self._cluster}: {self.show(*names)} contradict each other: {why}. Leave the variables as the "
            "cluster sets them, or say --cluster none and give the ranks with --node-rank"
        )


def job_port(job_id: str, step: int = 0) -> int:
    """Return a port for a step of a job, which other jobs on the same node are unlikely to use.

    Two jobs whose numbers differ by less than 1,491 never share a port in steps 0 to 12. In the same step, any
    difference below 19,391 suffices. A job whose name is no number gets a port by the name's checksum.
    """
    number = int(job_id) if job_id.isascii() and job_id.isdecimal() else crc32(job_id.encode())
    return _FIRST_PORT + (number * _STEPS_APART + step) % _NUM_PORTS


def visible_devices(environment: Mapping[str, str]) -> tuple[tuple[str, ...] | None, dict[str, str]]:
    """Return the accelerators that a task was bound to (None without a binding), and the variable of the binding.

    A variable that is set but empty, or that says "NoDevFiles" as Slurm does, binds the task to no accelerator.
    """
    for name in _VISIBILITY:
        if name in environment:
            text = environment[name]
            found = () if text in ("NoDevFiles", "-1") else tuple(each.strip() for each in text.split(","))
            return tuple(each for each in found if each), {"devices": name}
    return None, {}


def place_node(
    read: JobVariables,
    *,
    cluster: str,
    job_id: str,
    names: Mapping[str, str],
    restart_count: int,
    devices: tuple[str, ...] | None = None,
) -> JobPlacement:
    """Return the place of a task that is the only one on its node.

    `names` are the variables of num_nodes, node_rank, master_addr and master_port; `devices` are the accelerators
    that the task was bound to, None without a binding.
    """
    num_nodes, nodes_from = read.integer(names["num_nodes"], least=1)
    node_rank, rank_from = read.integer(names["node_rank"])
    if node_rank >= num_nodes:
        raise ClusterError(
            f"{rank_from}={node_rank}: contradicts {nodes_from}={num_nodes}; ranks of nodes count from 0 to "
            f"{num_nodes - 1}"
        )
    port, port_from = read.integer(names["master_port"], least=1)
    if port > 65535:
        raise ClusterError(f"{port_from}={port}: must be a port, from 1 to 65535")
    return JobPlacement(
        cluster=cluster,
        job_id=job_id,
        num_nodes=num_nodes,
        node_rank=node_rank,
        tasks_per_node=1,
        local_task=0,
        num_tasks=num_nodes,
        task_rank=node_rank,
        master_addr=read.text(names["master_addr"])[0],
        master_port=port,
        devices=devices,
        restart_count=restart_count,
        sources=dict(names),
    )
