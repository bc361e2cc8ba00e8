"""The arguments of `drivetrain submit`, in addition to the flags of `drivetrain launch`."""

from dataclasses import dataclass, field
from pathlib import Path

from drivetrain_config import Layers
from drivetrain_launcher.errors import LaunchError


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitArguments:
    """The arguments of `drivetrain submit`."""

    script: str = field(
        metadata={
            "positional": True,
            "help": "Script to run; a module's name with -m, a program with --program.",
        }
    )
    arguments: tuple[str, ...] = field(
        default=(), metadata={"rest": True, "help": "The script's own arguments, handed to it untouched."}
    )
    on: str = field(
        metadata={
            "plugins": "drivetrain.clusters",
            "help": "Cluster to submit to: slurm, kubernetes, ray, local (this machine), or one of a plug-in.",
        }
    )
    name: str | None = field(
        default=None, metadata={"help": "Name of the job; unset: the name of the script without its ending."}
    )
    folder: Path = field(
        default=Path("."), metadata={"help": "Working directory of the job, on the nodes of the cluster."}
    )
    accelerators_per_node: int | None = field(
        default=None,
        metadata={
            "help": "Number of accelerators to request on each node; unset: processes_per_node, or none with --cpu."
        },
    )
    cpus_per_node: int | None = field(
        default=None, metadata={"help": "Number of CPU cores to request on each node."}
    )
    memory_per_node: str | None = field(
        default=None, metadata={"help": "Memory to request on each node, such as 64GB."}
    )
    time: str | None = field(
        default=None,
        metadata={"help": "Time after which the cluster ends the job, such as 12:00:00, 90m or 1d12h."},
    )
    save_seconds: int = field(
        default=120,
        metadata={"help": "Seconds that the job has to save before its time ends, or after a preemption."},
    )
    max_requeues: int = field(
        default=3,
        metadata={
            "help": "Number of times that the job starts again after a preemption or the end of its time."
        },
    )
    option: tuple[str, ...] = field(
        default=(),
        metadata={
            "repeated": True,
            "help": "Option of the cluster, such as partition=gpu; may be given several times.",
        },
    )
    env: tuple[str, ...] = field(
        default=(),
        metadata={
            "repeated": True,
            "help": "Variable of the job, NAME=VALUE, or NAME for its value here; may be given several times.",
        },
    )
    follow: bool = field(default=True, metadata={"help": "Show the output of the job until it ends."})
    dry_run: bool = field(
        default=False, metadata={"help": "Print the files and the command; write and submit nothing."}
    )
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
