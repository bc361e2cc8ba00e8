"""Plan the ranks of a notebook: how many, on which devices, with which settings."""

from drivetrain_config import environ
from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.plan.host_detection import Host, detect_host
from drivetrain_launcher.run.notebook.crew_plan import CrewPlan
from drivetrain_launcher.run.notebook.hosted import check_supported, detect_notebook_host


def plan_crew(
    num_processes: int | None,
    *,
    mixed_precision: str | None = None,
    master_port: int = 0,
    cpu: bool = False,
) -> CrewPlan:
    """Plan the ranks on this machine.

    Args:
        num_processes: The number of ranks; None for one per accelerator, or one if there is none.
        mixed_precision: The `run.mixed_precision` setting of the ranks; None leaves it to their code.
        master_port: The port of the rendezvous; 0 for any free port.
        cpu: Whether the ranks train on the CPU.

    Raises:
        LaunchError: If there are fewer accelerators than ranks, a number is invalid, or the machine has a TPU.
    """
    if num_processes is not None and (type(num_processes) is not int or num_processes < 1):
        raise LaunchError(
            f"num_processes={num_processes!r}: must be an integer of at least 1, the processes to start"
        )
    if not cpu:
        check_supported(detect_notebook_host(environ.child_environment()), num_processes=num_processes)
    host = detect_host("cpu" if cpu else "auto")
    variables = {} if mixed_precision is None else {"DRIVETRAIN_RUN__MIXED_PRECISION": mixed_precision}
    if cpu:
        variables["DRIVETRAIN_STATE__DEVICE"] = "cpu"
    return CrewPlan(num_processes=_count(num_processes, host), variables=variables, master_port=master_port)


def _count(asked: int | None, host: Host) -> int:
    if asked is None:
        return max(1, host.accelerator_count)
    if host.accelerator is not None and asked > host.accelerator_count:
        raise LaunchError(
            f"num_processes={asked}: this machine has {host.accelerator_count} {host.accelerator} devices to give "
            f"them; say at most {host.accelerator_count}, or use debug_launcher, which trains on the CPU"
        )
    return asked
