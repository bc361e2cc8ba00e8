"""Refuse to set up TPU pods, and say what to do."""

from dataclasses import dataclass, field

from drivetrain_launcher.errors import LaunchError


@dataclass(frozen=True, slots=True, kw_only=True)
class PodArguments:
    """The arguments of `drivetrain accelerate tpu-config`."""

    arguments: tuple[str, ...] = field(default=(), metadata={"rest": True, "help": "Flags of Accelerate's."})


def run(arguments: PodArguments) -> int:  # noqa: ARG001 any is refused alike
    """Refuse to set up a TPU pod, and say what to do."""
    raise LaunchError(
        "accelerate tpu-config: drivetrain has no XLA backend yet, and cannot set up TPU pods: "
        "train on GPUs or CPUs by `drivetrain launch`; to run commands on each machine of a pod, use `gcloud compute "
        "tpus tpu-vm ssh NAME --worker=all --command COMMAND`"
    )
