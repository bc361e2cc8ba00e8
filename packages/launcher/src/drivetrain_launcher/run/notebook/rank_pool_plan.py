"""Plan the ranks of a notebook: how many, on which devices, with which settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from drivetrain_config import environ
from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.plan.host_detection import Host, detect_host
from drivetrain_launcher.plan.launch_plan import LaunchPlan, LaunchTarget
from drivetrain_launcher.run.notebook.figures import BACKEND
from drivetrain_launcher.run.notebook.hosted import check_supported, detect_notebook_host


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPoolPlan:
    """The plan of a pool, on one machine.

    Attributes:
        num_processes: The number of ranks.
        variables: The environment variables of each rank, besides those of the notebook.
        master_port: The port of the rendezvous; 0 for any free port.
    """

    num_processes: int
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    master_port: int = 0

    def environments(self, notebook: Mapping[str, str], *, port: int) -> list[dict[str, str]]:
        """Return the environment of each rank: the notebook's, with torchrun's variables.

        Args:
            notebook: The environment of the notebook.
            port: The port where the ranks meet.
        """
        common = {**notebook, **self.variables}
        if self.num_processes > 1:
            common.setdefault("OMP_NUM_THREADS", "1")  # as under `drivetrain launch`
        if "backend_inline" in common.get("MPLBACKEND", ""):
            common["MPLBACKEND"] = BACKEND
        plan = LaunchPlan(
            mode="elastic",
            target=LaunchTarget(name="a function"),
            processes_per_node=self.num_processes,
            master_port=port,
        )
        of_agent = {
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_RUN_ID": plan.rdzv_id,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        return [{**common, **each.environment, **of_agent} for each in plan.ranks()]


def plan_rank_pool(
    num_processes: int | None,
    *,
    mixed_precision: str | None = None,
    master_port: int = 0,
    cpu: bool = False,
) -> RankPoolPlan:
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
    return RankPoolPlan(
        num_processes=_count(num_processes, host), variables=variables, master_port=master_port
    )


def _count(asked: int | None, host: Host) -> int:
    if asked is None:
        return max(1, host.accelerator_count)
    if host.accelerator is not None and asked > host.accelerator_count:
        raise LaunchError(
            f"num_processes={asked}: this machine has {host.accelerator_count} {host.accelerator} devices to give "
            f"them; say at most {host.accelerator_count}, or use debug_launcher, which trains on the CPU"
        )
    return asked
