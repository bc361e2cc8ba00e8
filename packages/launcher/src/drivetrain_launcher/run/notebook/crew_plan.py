"""A plan of the ranks of a notebook, as a frozen value."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from drivetrain_launcher.plan.launch_plan import LaunchPlan, LaunchTarget
from drivetrain_launcher.run.notebook.figures import BACKEND


@dataclass(frozen=True, slots=True, kw_only=True)
class CrewPlan:
    """The plan of a crew, on one machine.

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
