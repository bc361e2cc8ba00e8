"""A launch plan as a frozen, printable value: the command and environment of every rank."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from drivetrain_clusters.protocol import JobPlacement
from drivetrain_launcher.settings import OutputPrefix, RendezvousBackend
from drivetrain_messages import format_count

if TYPE_CHECKING:
    from drivetrain_launcher.plan.core_binding import CoreBinding

# Run by its path, so that the folder that Python puts first on sys.path is one that the worker then replaces.
WORKER = Path(__file__).parents[1] / "run" / "worker.py"
# What a plan shows for a port that is chosen as the processes start.
ANY_PORT = "any free port"
# The number of last lines that are shown of a failed rank whose output was not.
HIDDEN_TAIL = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchTarget:
    """The script, module or program to run: its path or name, and its arguments, unchanged."""

    name: str
    arguments: tuple[str, ...] = ()
    kind: Literal["script", "module", "program"] = "script"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """A process of a plan; with c10d rendezvous, its rank is that of a node which is the first to arrive."""

    rank: int
    local_rank: int
    command: tuple[str, ...]
    environment: Mapping[str, str]
    binding: "CoreBinding | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """The plan of a launch on this node. What `LaunchSettings` has too means the same here, as it was decided.

    Attributes:
        mode: "in place" runs the script in the launcher's own process; "elastic" starts processes with torch's agent.
        node_rank: The rank of this node; None if the rendezvous decides.
        master_port: The port of the rendezvous; 0 for any free port.
        standstill_seconds: The time after which a process that a signal has stopped is killed; None for no limit.
        environment: The variables that the launcher adds to the environment of each process, without rank variables.
        bindings: The cores of each rank, by local rank; empty to bind none.
        placement: The place in a cluster's job; None outside any job.
        has_ranks: Whether another launcher has set this process's ranks and the plan keeps them; only in place.
        notes: The decisions made by default, to be printed once.
    """

    mode: Literal["in place", "elastic"]
    target: LaunchTarget
    num_nodes: int = 1
    min_nodes: int | None = None
    node_silence_seconds: float = 6.0
    node_rank: int | None = 0
    processes_per_node: int = 1
    rdzv_backend: RendezvousBackend = "static"
    rdzv_id: str = "none"
    rdzv_timeout_seconds: float = 900.0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    max_restarts: int = 0
    monitor_interval_seconds: float = 0.1
    shutdown_timeout_seconds: float = 30.0
    standstill_seconds: float | None = None
    preload: tuple[str, ...] = ()
    log_dir: Path | None = None
    prefix: OutputPrefix = "others"
    show_ranks: tuple[int, ...] = ()
    tail: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    bindings: "tuple[CoreBinding, ...]" = ()
    placement: JobPlacement | None = None
    max_requeues: int | None = None
    has_ranks: bool = False
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """The number of processes on all nodes together."""
        if self.is_cluster_task and self.placement is not None:
            return self.placement.num_tasks
        return self.num_nodes * self.processes_per_node

    @property
    def is_cluster_task(self) -> bool:
        """True if the cluster starts one task per rank, and this process is one of them."""
        return self.placement is not None and self.placement.is_one_task_per_rank

    @property
    def is_static_meeting(self) -> bool:
        """True if several nodes use static rendezvous, with given node ranks."""
        return self.num_nodes > 1 and self.rdzv_backend == "static"

    @property
    def command(self) -> tuple[str, ...]:
        """The command on each rank of an elastic plan, or the equivalent command of a run in place."""
        target = self.target
        if target.kind == "program":
            return (target.name, *target.arguments)
        dash_m = ("-m",) if target.kind == "module" else ()
        if self.mode == "in place":
            return (sys.executable, *dash_m, target.name, *target.arguments)
        return (sys.executable, str(WORKER), *dash_m, target.name, *target.arguments)

    def tail_of(self, rank: int) -> int:
        """Return the number of last lines of a rank to show again if it fails."""
        if self.tail is not None:
            return self.tail
        return HIDDEN_TAIL if self.show_ranks and rank not in self.show_ranks else 0

    def ranks(self) -> tuple[RankPlan, ...]:
        """Return the plans of the processes on this node that this launcher starts."""
        first, local_ranks = (self.node_rank or 0) * self.processes_per_node, range(self.processes_per_node)
        if self.is_cluster_task and self.placement is not None:
            local_task = self.placement.local_task
            first, local_ranks = self.placement.task_rank - local_task, range(local_task, local_task + 1)
        plans: list[RankPlan] = []
        for local_rank in local_ranks:
            own = {
                "RANK": str(first + local_rank),
                "LOCAL_RANK": str(local_rank),
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_WORLD_SIZE": str(self.processes_per_node),
                "GROUP_RANK": str(self.node_rank or 0),
                "GROUP_WORLD_SIZE": str(self.num_nodes),
                "MASTER_ADDR": self.master_addr,
                "MASTER_PORT": str(self.master_port or ANY_PORT),
            }
            plan = RankPlan(
                rank=first + local_rank,
                local_rank=local_rank,
                command=self.command,
                environment={**self.environment, **({} if self.has_ranks else own)},
                binding=self.bindings[local_rank] if self.bindings else None,
            )
            plans.append(plan)
        return tuple(plans)

    def __str__(self) -> str:
        processes, nodes = format_count(self.world_size, "process"), format_count(self.num_nodes, "node")
        how = "in the launcher's own process" if self.mode == "in place" else "under torch's elastic agent"
        first_line = f"{processes} {how}: {nodes} x {self.processes_per_node}"
        if self.is_cluster_task:
            first_line = (
                f"{self.world_size} processes, each started by the cluster and run in its launcher's own process: "
                f"{nodes}, {self.processes_per_node} on this one"
            )
        lines = [*_cluster_lines(self.placement), first_line]
        if self.min_nodes is not None:
            lines.append(
                f"elastic: goes on with {self.min_nodes} to {self.num_nodes} nodes; one that is silent for "
                f"{self.node_silence_seconds:g} s is left behind"
            )
        if self.mode == "elastic":
            port = self.master_port or ANY_PORT
            lines.append(
                f"rendezvous: {self.rdzv_backend} at {self.master_addr}:{port}, run {self.rdzv_id!r}"
            )
        if self.preload and self.mode == "elastic":
            lines.append(f"ranks are forked off a process that imports {', '.join(self.preload)}")
        # First what is the same for each rank, then what is a rank's own.
        ranks = self.ranks()
        first = ranks[0]
        common = dict(set.intersection(*(set(rank.environment.items()) for rank in ranks)))
        who = "each rank" if len(ranks) > 1 else f"rank {first.rank}"
        lines.append(f"{who}: {' '.join(self.command)}")
        lines += [f"    {name}={text}" for name, text in first.environment.items() if name in common]
        for rank in ranks:
            shown = [f"{name}={text}" for name, text in rank.environment.items() if name not in common]
            if rank.binding is not None:
                shown.append(f"bound to {rank.binding}")
            if shown:
                lines.append(f"rank {rank.rank}: {' '.join(shown)}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _cluster_lines(place: JobPlacement | None) -> list[str]:
    """Describe the place in a cluster's job: each value with the variables that it was read from."""
    if place is None:
        return []
    hosts = place.hosts if len(place.hosts) <= 4 else (*place.hosts[:2], "...", place.hosts[-1])
    names = ("num_nodes", "node_rank", "num_tasks", "tasks_per_node", "task_rank", "local_task", "hosts")
    names += ("master_addr", "master_port", "devices", "restart_count")
    devices = None if place.devices is None else ",".join(place.devices) or "none"
    shown = {name: getattr(place, name) for name in names} | {"hosts": ",".join(hosts), "devices": devices}
    each = "one task per rank" if place.is_one_task_per_rank else "one task per node"
    rows = [(name, str(value)) for name, value in shown.items() if value not in (None, "")]
    width = max(len(value) for _, value in rows)
    return [
        f"cluster {place.cluster}, job {place.job_id} ({place.source('job_id')}), {each}:",
        *(f"    {name:<14} {value:<{width}}  {place.source(name)}" for name, value in rows),
    ]
