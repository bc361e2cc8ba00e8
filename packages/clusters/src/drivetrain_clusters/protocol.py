"""The protocol of a cluster, and the frozen values that it takes and returns."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

# The exit code of a rank, and of a job, that has saved on a signal and is to be started again: EX_TEMPFAIL of
# sysexits.h. The checkpoint package ends programs with it.
RESUME_EXIT_CODE = 75


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlacement:
    """The place of one task in its job, as the cluster's environment states it.

    A cluster starts either one task per node, whose launcher starts the ranks of its node, or one task per rank.

    Attributes:
        job_id: The cluster's name for the job, which is also the name of the run.
        tasks_per_node: The number of tasks that the cluster started on this node.
        local_task: The index of this task on its node, from 0.
        task_rank: The index of this task among all of them, from 0.
        master_addr: The host name or address of node 0; empty if the cluster does not say where node 0 is, so
            that the user must.
        master_port: A port for the rendezvous that other jobs on the node are unlikely to use.
        devices: The accelerators that the cluster bound this task to, as its visibility variable names them; None if
            it bound none.
        hosts: The host name of each node by its rank; empty if the cluster does not state the names.
        restart_count: The number of times that the cluster has requeued the job.
        sources: The environment variables that each attribute was read from, for error messages, such as
            {"num_nodes": "SLURM_STEP_NUM_NODES"}.
    """

    cluster: str
    job_id: str
    num_nodes: int
    node_rank: int
    tasks_per_node: int
    local_task: int
    num_tasks: int
    task_rank: int
    master_addr: str
    master_port: int
    devices: tuple[str, ...] | None = None
    hosts: tuple[str, ...] = ()
    restart_count: int = 0
    sources: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def is_one_task_per_rank(self) -> bool:
        """True if the cluster starts each rank itself, so that a launcher runs its script in place.

        The value is the same on all tasks, even if some nodes have one task and others several.
        """
        return self.num_tasks > self.num_nodes

    def source(self, attribute: str) -> str:
        """Return the variables that an attribute was read from, or the cluster's name if no variable is known."""
        return self.sources.get(attribute, self.cluster)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """A job to submit.

    Attributes:
        command: The command that each node runs, `drivetrain launch ...`, as separate words.
        processes_per_node: The number of processes on each node; None for one per accelerator.
        accelerators_per_node: The number of accelerators to request on each node; 0 for none.
        cpus_per_node: The number of CPU cores to request on each node; None for the cluster's default.
        memory_per_node: The memory to request on each node, such as "64GB"; None for the cluster's default.
        time_limit_seconds: The time after which the cluster ends the job; None for the cluster's default.
        save_seconds: The time before the limit, or after a preemption, at which the job is told to save.
        max_requeues: The number of times that a preempted or timed-out job starts again.
        device: The kind of device that the run is for, as `state.device` says it, or "cpu" by `run.cpu`.
        mixed_precision: The precision of the run, as `run.mixed_precision` says it.
        options: The cluster's own options by name, such as {"partition": "gpu"} for Slurm.
    """

    name: str
    command: tuple[str, ...]
    folder: Path
    num_nodes: int = 1
    processes_per_node: int | None = None
    accelerators_per_node: int = 0
    cpus_per_node: int | None = None
    memory_per_node: str | None = None
    time_limit_seconds: int | None = None
    save_seconds: int = 120
    max_requeues: int = 3
    log_dir: Path = Path("logs")
    device: str = "auto"
    mixed_precision: str = "no"
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    options: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job in the cluster's own form, before anything is written or submitted.

    Attributes:
        files: The text of each file to write, by its path.
        command: The command that submits the job, as separate words that no shell reads; empty if the plug-in
            submits through a library.
        notes: Remarks for the user, each a sentence.
    """

    files: Mapping[Path, str]
    command: tuple[str, ...]
    request: JobRequest
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"# {path}\n{text}" for path, text in self.files.items()]
        parts += [f"note: {note}" for note in self.notes]
        return "\n".join([*parts, *([f"$ {shlex.join(self.command)}"] if self.command else [])])


class Cluster(Protocol):
    """A cluster that starts jobs, as an entry point of the group `drivetrain.clusters`: a class without arguments.

    The calls are, in order:

    1. `placement`, by every launcher that starts, with the environment of its process. It is pure.
    2. `requeue`, inside a job, by the launcher of task 0 alone, after all ranks have saved because the job was
       preempted or is about to reach its time limit.

    From outside a job, `drivetrain submit` calls:

    3. `plan`, which is pure, and shows the user what would be submitted.
    4. `submit`, after the files of the submission are written.
    5. `follow`, unless the user only submits; `cancel`, when the user says so.

    `drivetrain_clusters.testing.ClusterContract` holds the contract that every cluster must pass.
    """

    def placement(self, environment: Mapping[str, str]) -> JobPlacement | None:
        """Return the place of this process in its job; None if the environment is not one of this cluster's jobs.

        A ClusterError names variables, with their values, that are missing or contradict each other.
        """
        ...

    def requeue(self, placement: JobPlacement) -> bool:
        """Ask the cluster to start the job again; return False if the cluster does so by itself or cannot.

        ClusterError if the cluster refused.
        """
        ...

    def plan(self, request: JobRequest) -> Submission:
        """Return the files and the command that submit a job. Pure: nothing is written.

        ClusterError if the cluster cannot run the request, or an option is unknown to it.
        """
        ...

    def submit(self, submission: Submission) -> str:
        """Submit the job and return its id; ClusterError if what submits is not installed, or the cluster refused."""
        ...

    def follow(self, job_id: str, submission: Submission, write: Callable[[str], None]) -> int:
        """Write the job's output as it appears, until the job ends, across requeues; return its exit code."""
        ...

    def cancel(self, job_id: str) -> None:
        """End the job; ClusterError if the cluster does not know the job, or refused."""
        ...
