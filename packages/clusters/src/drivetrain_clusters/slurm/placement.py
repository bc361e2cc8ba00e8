"""The place of a task in a Slurm job, from the variables that srun sets."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.host_lists import expand_counts, expand_hosts
from drivetrain_clusters.job_variables import JobVariables, job_port, visible_devices
from drivetrain_clusters.mpi.placement import find_starter
from drivetrain_clusters.protocol import JobPlacement

# Slurm numbers the steps that run no tasks of srun from here on: interactive, batch, extern, pending.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


_Expanded = TypeVar("_Expanded")


def slurm_placement(environment: Mapping[str, str]) -> JobPlacement | None:
    """Return the place of a task that srun started; None in any other process.

    The shell of `sbatch` or `salloc` is no task, though it has most of the variables: only srun sets those of a step.
    Tasks are ranked node by node, as torchrun ranks processes, even if srun distributes tasks cyclically.
    """
    own_step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", ""))
    is_step = own_step.isascii() and own_step.isdecimal() and int(own_step) < _FIRST_SPECIAL_STEP
    # mpirun starts its daemons by srun, whose variables the ranks inherit.
    if not is_step or find_starter(environment) is not None:
        return None
    read = JobVariables("slurm", environment)
    if (size := read.optional_integer("SLURM_HET_SIZE")) is not None and size > 1:
        raise ClusterError(
            f"slurm: SLURM_HET_SIZE={size}: the parts of a heterogeneous job do not know each other's nodes; submit "
            "a job of one part, or say --cluster none and give the ranks with --node-rank and --master-addr"
        )
    hosts, nodelist = _expand(read, expand_hosts, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    num_nodes, nodes_from = read.integer("SLURM_STEP_NUM_NODES", "SLURM_NNODES", least=1)
    if len(hosts) != num_nodes:
        raise read.contradict(f"the list names {len(hosts)} nodes", nodes_from, nodelist)
    counts, num_tasks, counts_from, tasks_from = _tasks(read, environment, num_nodes, nodes_from)
    node_rank, local_task = _place(read, hosts, nodelist, counts, counts_from)
    step = read.integer("SLURM_STEP_ID", "SLURM_STEPID")[0]
    job_id, job_from = read.text("SLURM_JOB_ID", "SLURM_JOBID")
    devices, of_devices = visible_devices(environment)
    port = read.optional_integer("MASTER_PORT")
    has_addr = bool(environment.get("MASTER_ADDR"))
    return JobPlacement(
        cluster="slurm",
        job_id=job_id,
        num_nodes=num_nodes,
        node_rank=node_rank,
        tasks_per_node=counts[node_rank],
        local_task=local_task,
        num_tasks=num_tasks,
        task_rank=sum(counts[:node_rank]) + local_task,
        master_addr=environment["MASTER_ADDR"] if has_addr else hosts[0],
        master_port=port or job_port(job_id, step),
        devices=devices,
        hosts=hosts,
        restart_count=read.optional_integer("SLURM_RESTART_COUNT") or 0,
        sources={
            "job_id": job_from,
            "num_nodes": nodes_from,
            "node_rank": "SLURM_NODEID",
            "tasks_per_node": counts_from,
            "local_task": "SLURM_LOCALID",
            "num_tasks": tasks_from,
            "task_rank": f"{counts_from} and SLURM_LOCALID",
            "master_addr": "MASTER_ADDR" if has_addr else nodelist,
            "master_port": "MASTER_PORT" if port else f"{job_from} and SLURM_STEP_ID",
            "hosts": nodelist,
            "restart_count": "SLURM_RESTART_COUNT",
            **of_devices,
        },
    )


def _expand(read: JobVariables, expand: Callable[[str], _Expanded], *names: str) -> tuple[_Expanded, str]:
    text, name = read.text(*names)
    try:
        return expand(text), name
    except ValueError as error:
        raise ClusterError(f"slurm: {name}={error}") from None


def _tasks(
    read: JobVariables, environment: Mapping[str, str], num_nodes: int, nodes_from: str
) -> tuple[tuple[int, ...], int, str, str]:
    """Return the number of tasks of each node, their sum, and the variables of both.

    SLURM_NTASKS_PER_NODE is the user's request, from which srun may differ. The variable counts only if no other one
    gives the number.
    """
    num_tasks, tasks_from = read.integer("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", least=1)
    per_node = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if not any(environment.get(name) for name in per_node) and environment.get("SLURM_NTASKS_PER_NODE"):
        each, counts_from = read.integer("SLURM_NTASKS_PER_NODE", least=1)
        counts = (each,) * num_nodes
    else:
        counts, counts_from = _expand(read, expand_counts, *per_node)
    if len(counts) != num_nodes:
        raise read.contradict(f"the counts are of {len(counts)} nodes", nodes_from, counts_from)
    if sum(counts) != num_tasks:
        why = f"the counts of {num_nodes} nodes make {sum(counts)} tasks"
        raise read.contradict(why, tasks_from, counts_from, nodes_from)
    asked = read.optional_integer("SLURM_NTASKS")
    if asked is not None and asked != num_tasks:
        raise read.contradict("they are of the same step", "SLURM_NTASKS", tasks_from)
    return counts, num_tasks, counts_from, tasks_from


def _place(
    read: JobVariables, hosts: tuple[str, ...], nodelist: str, counts: tuple[int, ...], counts_from: str
) -> tuple[int, int]:
    """Return the node's rank and the task's index on it, after checking that the job has such a task."""
    node_rank, _ = read.integer("SLURM_NODEID")
    local_task, _ = read.integer("SLURM_LOCALID")
    if node_rank >= len(hosts):
        raise read.contradict(f"the nodes are 0 to {len(hosts) - 1}", "SLURM_NODEID", nodelist)
    if local_task >= counts[node_rank]:
        why = f"node {node_rank} has {counts[node_rank]} tasks, counted from 0"
        raise read.contradict(why, "SLURM_LOCALID", "SLURM_NODEID", counts_from)
    rank = read.optional_integer("SLURM_PROCID")
    if rank is not None and rank >= sum(counts):
        raise read.contradict(f"there are {sum(counts)} tasks, counted from 0", "SLURM_PROCID", counts_from)
    if read.optional_text("SLURMD_NODENAME") not in (None, hosts[node_rank]):
        why = f"node {node_rank} of the list is {hosts[node_rank]}"
        raise read.contradict(why, "SLURMD_NODENAME", "SLURM_NODEID", nodelist)
    return node_rank, local_task
