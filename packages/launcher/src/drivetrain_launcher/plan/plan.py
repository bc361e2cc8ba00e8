"""A launch as a frozen value that prints: which command runs on which rank, with which environment."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from drivetrain_launcher.settings import RendezvousBackend

# Run by its path, so that the folder that Python puts first on sys.path is one that the worker then replaces.
WORKER = Path(__file__).parents[1] / "run" / "worker.py"
# What a plan shows for a port that is chosen as the processes start.
ANY_PORT = "any free port"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is run.

    Attributes:
        name: A script's path, a module's name or a program.
        arguments: The script's own arguments, untouched.
        kind: Which of the three it is.
    """

    name: str
    arguments: tuple[str, ...] = ()
    kind: Literal["script", "module", "program"] = "script"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One process of a plan.

    Attributes:
        rank: Its number among all; with c10d rendezvous, what it gets if this node is the first to arrive.
        local_rank: Its number on its node.
        command: What is executed.
        environment: What is added to the environment.
    """

    rank: int
    local_rank: int
    command: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """How a launch is carried out on this node.

    Attributes:
        mode: "in place": the launcher's own process runs the script; "elastic": torch's agent starts processes.
        target: What is run.
        num_nodes: Machines.
        node_rank: This machine among them; None if rendezvous decides.
        processes_per_node: Processes on each machine.
        rdzv_backend: How the machines meet.
        rdzv_id: The run's name.
        rdzv_timeout_seconds: How long machines wait for each other.
        master_addr: Where they meet.
        master_port: Where they meet; 0 for any free port.
        max_restarts: How often all processes are started again.
        monitor_interval_seconds: Time between two looks at the processes.
        shutdown_timeout_seconds: What processes have to save before they are killed.
        log_dir: Where output is written, besides the screen.
        environment: What the launcher adds to the environment of each process, besides its ranks.
        has_ranks: Whether another launcher has set the ranks of this process, which then stay: in place alone.
        notes: What was decided without being asked, to be said once.
    """

    mode: Literal["in place", "elastic"]
    target: Target
    num_nodes: int = 1
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
    log_dir: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    has_ranks: bool = False
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Processes on all nodes together."""
        return self.num_nodes * self.processes_per_node

    @property
    def is_static_meeting(self) -> bool:
        """Whether several nodes meet, each of which was told its rank."""
        return self.num_nodes > 1 and self.rdzv_backend == "static"

    @property
    def command(self) -> tuple[str, ...]:
        """What is executed on each rank of an elastic plan, or what running in place stands for."""
        target = self.target
        if target.kind == "program":
            return (target.name, *target.arguments)
        dash_m = ("-m",) if target.kind == "module" else ()
        if self.mode == "in place":
            return (sys.executable, *dash_m, target.name, *target.arguments)
        return (sys.executable, str(WORKER), *dash_m, target.name, *target.arguments)

    def ranks(self) -> tuple[RankPlan, ...]:
        """The processes of this node."""
        first = (self.node_rank or 0) * self.processes_per_node
        return tuple(
            RankPlan(
                rank=first + local_rank,
                local_rank=local_rank,
                command=self.command,
                environment={**self.environment, **self._ranks_environment(first, local_rank)},
            )
            for local_rank in range(self.processes_per_node)
        )

    def _ranks_environment(self, first: int, local_rank: int) -> dict[str, str]:
        if self.has_ranks:
            return {}
        return {
            "RANK": str(first + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.processes_per_node),
            "GROUP_RANK": str(self.node_rank or 0),
            "GROUP_WORLD_SIZE": str(self.num_nodes),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port or ANY_PORT),
        }

    def __str__(self) -> str:
        how = "in the launcher's own process" if self.mode == "in place" else "under torch's elastic agent"
        lines = [
            f"{self.world_size} process{'es' if self.world_size > 1 else ''} {how}: "
            f"{self.num_nodes} node{'s' if self.num_nodes > 1 else ''} x {self.processes_per_node}",
        ]
        if self.mode == "elastic":
            port = self.master_port or "any free port"
            lines.append(
                f"rendezvous: {self.rdzv_backend} at {self.master_addr}:{port}, run {self.rdzv_id!r}"
            )
        for plan in self.ranks():
            lines.append(f"rank {plan.rank}: {' '.join(plan.command)}")
            lines += [f"    {name}={text}" for name, text in plan.environment.items()]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])
