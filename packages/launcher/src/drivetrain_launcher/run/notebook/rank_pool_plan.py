"""Plan the ranks of a notebook: how many, on which devices, with which settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from drivetrain_config import environ
from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.plan.host_detection import detect_host
from drivetrain_launcher.plan.launch_plan import LaunchPlan, LaunchTarget
from drivetrain_launcher.plan.tpu_host import tpu_environment
from drivetrain_launcher.run.notebook.rank_channel import FIGURE_BACKEND

# A variable that a provider sets in each of the notebooks that it hosts, and the provider's name.
_PROVIDERS = {
    "COLAB_RELEASE_TAG": "Colab",
    "COLAB_BACKEND_VERSION": "Colab",
    "KAGGLE_KERNEL_RUN_TYPE": "Kaggle",
}
# Variables that runtimes with a TPU have.
_TPU_VARIABLES = (
    "COLAB_TPU_ADDR",
    "TPU_NAME",
    "TPU_WORKER_ID",
    "TPU_ACCELERATOR_TYPE",
    "TPU_PROCESS_ADDRESSES",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPoolPlan:
    """The plan of a pool on one machine: `variables` extend the notebook's environment; port 0 is any free port."""

    num_processes: int
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    master_port: int = 0

    def environments(self, notebook: Mapping[str, str], *, port: int) -> list[dict[str, str]]:
        """Return the environment of each rank: the notebook's with torchrun's variables."""
        common = {**notebook, **self.variables}
        if self.num_processes > 1:
            common.setdefault("OMP_NUM_THREADS", "1")  # as under `drivetrain launch`
        if "backend_inline" in common.get("MPLBACKEND", ""):
            common["MPLBACKEND"] = FIGURE_BACKEND
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
    num_processes: int | None, *, mixed_precision: str | None = None, master_port: int = 0, cpu: bool = False
) -> RankPoolPlan:
    """Plan the ranks on this machine; the arguments are those of `Workers`.

    Raises:
        LaunchError: If there are fewer accelerators than ranks, a number is invalid, or torch does not see the
            machine's TPU.
    """
    if num_processes is not None and (type(num_processes) is not int or num_processes < 1):
        raise LaunchError(
            f"num_processes={num_processes!r}: must be an integer of at least 1, the processes to start"
        )
    host = detect_host("cpu" if cpu else "auto")
    if not cpu and host.accelerator != "tpu":
        check_supported(environ.child_environment(), num_processes=num_processes)
    if num_processes is None:
        num_processes = max(1, host.accelerator_count)
    elif host.accelerator is not None and num_processes > host.accelerator_count:
        raise LaunchError(
            f"num_processes={num_processes}: this machine has {host.accelerator_count} {host.accelerator} devices to "
            f"give them; say at most {host.accelerator_count}, or use debug_launcher, which trains on the CPU"
        )
    variables = {} if mixed_precision is None else {"DRIVETRAIN_RUN__MIXED_PRECISION": mixed_precision}
    if host.tpus is not None:
        variables |= tpu_environment(host.tpus, num_processes=num_processes, num_nodes=1, hosts=())
    if cpu:
        variables["DRIVETRAIN_STATE__DEVICE"] = "cpu"
    return RankPoolPlan(num_processes=num_processes, variables=variables, master_port=master_port)


def check_supported(environment: Mapping[str, str], *, num_processes: int | None) -> None:
    """Refuse to launch where torch does not see the runtime's TPU, unless the caller asks for this process only.

    Raises:
        LaunchError: The runtime has a TPU, and `num_processes` is not 1.
    """
    has_tpu = environment.get("PJRT_DEVICE") == "TPU" or any(name in environment for name in _TPU_VARIABLES)
    if has_tpu and num_processes != 1:
        provider = next((name for variable, name in _PROVIDERS.items() if variable in environment), None)
        where = f"this {provider} runtime" if provider else "this machine"
        raise LaunchError(
            f"num_processes={num_processes}: {where} has a TPU, which torch does not see: install drivetrain[tpu] "
            "and start the kernel anew, or choose a GPU runtime; debug_launcher trains on the CPU; num_processes=1 "
            "calls the function in this process, whatever it does there"
        )
