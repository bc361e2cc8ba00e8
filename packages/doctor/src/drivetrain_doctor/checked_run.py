"""The run that the doctor checks a host for, as described by launch's settings or a cluster's job."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from drivetrain_clusters.protocol import JobPlacement
from drivetrain_launcher.plan.host_detection import Host
from drivetrain_launcher.plan.launch_plan import LaunchTarget
from drivetrain_launcher.plan.launch_planner import plan_launch
from drivetrain_launcher.settings import LaunchSettings, RendezvousBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRun:
    """The run that the doctor checks this host for.

    Attributes:
        environment: The environment of this process, which a run's processes would inherit.
        node_rank: The rank of this host; None if the hosts agree on their ranks.
        master_port: The port of the rendezvous; 0 for any free one.
        accelerator: The kind of accelerator that torch would use; None if there is none.
        folder: The folder of the checkpoints.
        num_workers: The number of workers of each process's DataLoader.
        batch_bytes: The size of a batch; None if unknown.
        wait_seconds: The time that hosts wait for each other.
        is_idle: Whether another task of the job checks this host.
    """

    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    num_nodes: int = 1
    node_rank: int | None = 0
    processes_per_node: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    rdzv_backend: RendezvousBackend = "static"
    accelerator: str | None = None
    folder: Path = Path()
    num_workers: int = 4
    batch_bytes: int | None = None
    wait_seconds: float = 30.0
    is_idle: bool = False

    @property
    def world_size(self) -> int:
        """The number of processes on all hosts together."""
        return self.num_nodes * self.processes_per_node

    @property
    def hosts_store(self) -> bool:
        """True if this host certainly hosts the run's store."""
        return self.num_nodes == 1 or self.node_rank == 0


def run_to_check(settings: LaunchSettings, host: Host, placement: JobPlacement | None) -> CheckedRun:
    """Return the run that launch's settings, or the job that this process belongs to, would start on this host.

    Raises:
        LaunchError: The settings describe no possible launch, as `drivetrain launch` would say.
    """
    plan = plan_launch(settings, LaunchTarget(name="doctor"), host, placement=placement)
    return CheckedRun(
        num_nodes=plan.num_nodes if plan.num_nodes > 1 else settings.num_nodes,
        node_rank=plan.node_rank,
        processes_per_node=plan.processes_per_node,
        master_addr=plan.master_addr,
        master_port=plan.master_port,
        rdzv_backend=plan.rdzv_backend,
        accelerator=host.accelerator,
        is_idle=placement is not None and placement.local_task > 0,
    )
