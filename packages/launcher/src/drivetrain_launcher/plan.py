"""Settings and what is known of the host to a plan: which command runs on which rank, with which environment.

Everything here is pure: a plan for ten thousand ranks can be made and read on a laptop.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.host import VISIBILITY_VARIABLES, Host
from drivetrain_launcher.settings import DEFAULT_PORT, LaunchSettings, RendezvousBackend

# Run by its path, so that the folder that Python puts first on sys.path is one that the worker then replaces.
WORKER = Path(__file__).with_name("worker.py")


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
        if self.mode == "in place":
            return {}
        return {
            "RANK": str(first + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.processes_per_node),
            "GROUP_RANK": str(self.node_rank or 0),
            "GROUP_WORLD_SIZE": str(self.num_nodes),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port or "any free port"),
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


def plan_launch(
    settings: LaunchSettings, target: Target, host: Host, *, handed_down: str | None = None
) -> LaunchPlan:
    """Decide how a launch is carried out on this node.

    Args:
        settings: The `launch` section.
        target: What is run.
        host: What is known of this node.
        handed_down: The settings for the workers, as `Layers.to_json` writes them.

    Raises:
        LaunchError: It cannot be carried out: too few accelerators, a node that is not told its rank. The message
            gives the numbers and the way out.
    """
    count, notes = _processes_per_node(settings, host)
    environment = {} if handed_down is None else {"DRIVETRAIN_CONFIG": handed_down}
    environment |= _visible(settings, host)
    threads = _threads(settings, host, count)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = threads
        if settings.threads_per_process is None:
            notes += (
                f"OMP_NUM_THREADS={threads} for each of {count} processes, so that they do not crowd the CPU; "
                "--threads-per-process sets another number",
            )
    # What only an agent can do brings the agent, also for one process.
    needs_agent = settings.num_nodes > 1 or settings.max_restarts > 0 or settings.log_dir is not None
    plan = LaunchPlan(
        mode="elastic" if count > 1 or needs_agent else "in place",
        target=target,
        processes_per_node=count,
        max_restarts=settings.max_restarts,
        monitor_interval_seconds=settings.monitor_interval_seconds,
        shutdown_timeout_seconds=settings.shutdown_timeout_seconds,
        log_dir=settings.log_dir,
        environment=environment,
        notes=notes,
    )
    return plan if plan.mode == "in place" else _meeting(plan, settings)


def _processes_per_node(settings: LaunchSettings, host: Host) -> tuple[int, tuple[str, ...]]:
    """How many processes this node runs, and what to say if nobody said."""
    available = len(settings.devices) if settings.devices else host.accelerator_count
    what = f"{host.accelerator} device{'s' if available != 1 else ''}"
    if host.accelerator is not None and available == 0:
        raise LaunchError(
            f"this node has no {host.accelerator} device that torch can use: say --cpu to train on the CPU, or leave "
            "the kind of device to be found out"
        )
    asked = settings.processes_per_node
    if asked is None and settings.num_processes is not None:
        asked = settings.num_processes // settings.num_nodes
    if asked is None:
        count = max(1, available)
        note = f"{count} processes, one for each of {available} {what}; --num-processes sets another number"
        return count, (note,) if count > 1 else ()
    if host.accelerator is not None and asked > available:
        raise LaunchError(
            f"{asked} processes on this node, but it has {available} {what} to give them: say "
            f"--num-processes {available * settings.num_nodes}, or --cpu to train on the CPU"
        )
    return asked, ()


def _visible(settings: LaunchSettings, host: Host) -> dict[str, str]:
    """The variable that restricts which accelerators are seen."""
    if not settings.devices:
        return {}
    shown = ",".join(map(str, settings.devices))
    if host.accelerator is None:
        raise LaunchError(f"--devices {shown}: this node has no accelerator that torch can use; leave it out")
    if host.accelerator not in VISIBILITY_VARIABLES:
        raise LaunchError(f"--devices {shown}: {host.accelerator} devices cannot be chosen; leave it out")
    missing = [d for d in settings.devices if isinstance(d, int) and not 0 <= d < host.accelerator_count]
    if missing and host.visible_devices is None:
        raise LaunchError(
            f"--devices {shown}: this node has {host.accelerator_count} {host.accelerator} devices, counted from 0; "
            f"there is no {', '.join(map(str, missing))}"
        )
    if len(set(settings.devices)) < len(settings.devices):
        raise LaunchError(f"--devices {shown}: names a device twice")
    return {VISIBILITY_VARIABLES[host.accelerator]: shown}


def _threads(settings: LaunchSettings, host: Host, count: int) -> str | None:
    if settings.threads_per_process is not None:
        return str(settings.threads_per_process)
    return "1" if count > 1 and host.omp_num_threads is None else None


def _meeting(plan: LaunchPlan, settings: LaunchSettings) -> LaunchPlan:
    """Where and how the nodes meet."""
    if settings.num_nodes == 1:
        return replace(
            plan,
            rdzv_id=settings.rdzv_id or "none",
            master_addr=settings.master_addr or "127.0.0.1",
            master_port=settings.master_port or 0,
        )
    if settings.master_addr is None:
        raise LaunchError(
            f"--num-nodes {settings.num_nodes}: say on every node where they meet, --master-addr HOST (a name or "
            "address of the node with rank 0)"
        )
    if settings.master_port == 0:
        raise LaunchError(
            f"--master-port 0: {settings.num_nodes} nodes must be told the same port; say one, or leave it out for "
            f"{DEFAULT_PORT}"
        )
    if settings.rdzv_backend == "static":
        _check_static(settings)
    elif settings.rdzv_id is None:
        raise LaunchError(
            "--rdzv-backend c10d: say on every node the same --rdzv-id NAME, so that runs do not mix"
        )
    elif settings.node_rank is not None:
        raise LaunchError(
            "--node-rank: with --rdzv-backend c10d the nodes agree on their ranks; leave it out"
        )
    return replace(
        plan,
        num_nodes=settings.num_nodes,
        node_rank=settings.node_rank,
        rdzv_backend=settings.rdzv_backend,
        rdzv_id=settings.rdzv_id or "none",
        rdzv_timeout_seconds=settings.rdzv_timeout_seconds,
        master_addr=settings.master_addr,
        master_port=settings.master_port or DEFAULT_PORT,
    )


def _check_static(settings: LaunchSettings) -> None:
    if settings.node_rank is None:
        raise LaunchError(
            f"--num-nodes {settings.num_nodes}: say on each node which it is, --node-rank 0 to "
            f"{settings.num_nodes - 1}; or use --rdzv-backend c10d, where they agree by themselves"
        )
    if settings.max_restarts:
        raise LaunchError(
            f"--max-restarts {settings.max_restarts}: several nodes restart together only with --rdzv-backend c10d"
        )
