"""The arguments of `drivetrain submit`, in addition to the flags of `drivetrain launch`."""

from dataclasses import dataclass, field
from pathlib import Path

from drivetrain_config import Layers
from drivetrain_launcher.errors import LaunchError
from drivetrain_messages import argument


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitArguments:
    """The arguments of `drivetrain submit`."""

    script: str = argument(
        ..., "Script to run; a module's name with -m, a program with --program.", positional=True
    )
    arguments: tuple[str, ...] = argument(
        (), "The script's own arguments, handed to it untouched.", rest=True
    )
    on: str = argument(
        ...,
        "slurm, kubernetes, ray, local or a plug-in; local is this machine.",
        plugins="drivetrain.clusters",
    )
    name: str | None = argument(None, "Name of the job; unset: the name of the script without its ending.")
    folder: Path = argument(Path("."), "Working directory, on the nodes.")
    accelerators_per_node: int | None = argument(
        None, "Accelerators to request on each node; unset: processes_per_node, or none with --cpu."
    )
    cpus_per_node: int | None = argument(None, "CPU cores to request on each node.")
    memory_per_node: str | None = argument(None, "Memory to request on each node, such as 64GB.")
    time: str | None = argument(None, "Time limit, such as 12:00:00, 90m or 1d12h.")
    save_seconds: int = argument(120, "Seconds to save before the end; as many after a preemption.")
    max_requeues: int = argument(3, "Restarts after a preemption; after the end of its time too.")
    option: tuple[str, ...] = argument(
        (), "Option of the cluster, such as partition=gpu; may be given several times.", repeated=True
    )
    env: tuple[str, ...] = argument(
        (),
        "Variable of the job, NAME=VALUE; NAME alone takes its value here; may be given several times.",
        repeated=True,
    )
    follow: bool = argument(
        True, "Show the output of the job until it ends.", brief="Return at once; do not show the output"
    )
    dry_run: bool = argument(False, "Print files and command, and submit nothing.")
    layers: Layers = field(default_factory=lambda: Layers({}), metadata={"finds_file": True})

    def __post_init__(self) -> None:
        asked = self.accelerators_per_node
        if asked is not None and asked < 0:
            raise LaunchError(f"--accelerators-per-node {asked}: say 0 for none, or a number above 0")
        for name, least in (("cpus_per_node", 1), ("save_seconds", 1), ("max_requeues", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise LaunchError(f"--{name.replace('_', '-')} {value}: must be at least {least}")
        if self.name is not None and not self.name.strip():
            raise LaunchError(f"--name {self.name!r}: is empty; say a name for the job")
