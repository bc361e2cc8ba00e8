"""Refuse to set up TPU pods, and say what to do."""

from dataclasses import dataclass

from drivetrain_launcher.errors import LaunchError
from drivetrain_messages import argument


@dataclass(frozen=True, slots=True, kw_only=True)
class PodArguments:
    """The arguments of `drivetrain accelerate tpu-config`."""

    arguments: tuple[str, ...] = argument((), "Flags of Accelerate's.", rest=True)


def run(arguments: PodArguments) -> int:  # any is refused alike
    """Refuse to set up a TPU pod, and say what to do."""
    raise LaunchError(
        "accelerate tpu-config: drivetrain sets up no machines: run commands on each machine of a pod by `gcloud "
        "compute tpus tpu-vm ssh NAME --worker=all --command COMMAND`, or a launch by `drivetrain submit --on "
        "tpu-pod --option hosts=HOST,HOST`"
    )
