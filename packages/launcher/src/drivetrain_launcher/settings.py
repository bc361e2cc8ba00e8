"""The `launch` section: the number of processes and nodes, and their rendezvous."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

RendezvousBackend = Literal["static", "c10d"]
OutputPrefix = Literal["others", "all", "none"]
CoreBindingMode = Literal["none", "auto"]

# The default port for the rendezvous of several nodes, as in torchrun.
DEFAULT_PORT = 29500

_CHOICES = {"rdzv_backend": RendezvousBackend, "prefix": OutputPrefix, "bind": CoreBindingMode}
_LEAST = {
    "num_processes": 1,
    "processes_per_node": 1,
    "num_nodes": 1,
    "min_nodes": 1,
    "max_restarts": 0,
    "max_requeues": 0,
    "threads_per_process": 1,
    "tail": 0,
}
_SECONDS = (
    "node_silence_seconds",
    "rdzv_timeout_seconds",
    "monitor_interval_seconds",
    "shutdown_timeout_seconds",
)


def _setting(default: Any, text: str, *, ask: str | None = None, brief: str = "") -> Any:
    """Return a field with its help, whole and brief, and the function of `launch_advice` that asks for it."""
    asked = {} if ask is None else {"ask": f"drivetrain_launcher.launch_advice:{ask}"}
    return field(default=default, metadata={"help": text, "brief": brief, "topic": "Processes", **asked})


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """The `launch` section, with field names as in torchrun and Accelerate."""

    num_processes: int | None = _setting(
        None,
        "Number of processes on all nodes together; unset: one per visible accelerator, or one without any.",
        ask="ask_num_processes",
        brief="Processes on all machines together",
    )
    processes_per_node: int | None = _setting(
        None, "Number of processes on each node, instead of num_processes."
    )
    num_nodes: int = _setting(
        1,
        "Number of machines; start the launcher on each. Elastic with --num-nodes MIN:MAX, such as 1:4, "
        "or with min_nodes too.",
        ask="ask_num_nodes",
        brief="Machines; MIN:MAX if elastic",
    )
    min_nodes: int | None = _setting(
        None,
        "Fewest machines that an elastic run goes on with, up to num_nodes; requires c10d; unset: the "
        "number is fixed.",
    )
    node_silence_seconds: float = _setting(
        6.0, "Seconds without a sign of life after which an elastic run goes on without a machine."
    )
    node_rank: int | None = _setting(
        None,
        "Rank of this machine among them, from 0; required with static rendezvous.",
        brief="Rank of this machine, from 0",
    )
    master_addr: str | None = _setting(
        None,
        "Host name or address of the machine with node rank 0.",
        ask="ask_master_addr",
        brief="Host or address of node rank 0",
    )
    master_port: int | None = _setting(
        None,
        "Port on master_addr; unset: any free port on one node, 29500 on several.",
        brief="Port on that host",
    )
    cluster: str = field(
        default="auto",
        metadata={
            "plugins": "drivetrain.clusters",
            "other_words": ("auto", "none"),
            "help": "Cluster whose job this is, by the name of its plug-in; auto: found by the variables that only a "
            "cluster's job has; none: all is given by settings.",
        },
    )
    max_requeues: int | None = _setting(
        None,
        "Maximum number of times that a cluster's job is started again after all ranks have saved on a "
        "signal; unset: no limit, 0: never.",
    )
    rdzv_backend: RendezvousBackend = _setting(  # noqa: RUF009 it returns a field
        "static",
        "Rendezvous of the nodes: static (node ranks are given) or c10d (nodes agree on their ranks).",
        ask="ask_rdzv_backend",
    )
    rdzv_id: str | None = _setting(
        None, "Name of this run, the same on all nodes; required with c10d.", ask="ask_rdzv_id"
    )
    rdzv_timeout_seconds: float = _setting(
        900.0, "Seconds that nodes wait for each other before the launch fails."
    )
    max_restarts: int = _setting(
        0, "Maximum number of restarts of all processes after a failure.", brief="Restarts after a failure"
    )
    monitor_interval_seconds: float = _setting(0.1, "Seconds between two checks of the processes.")
    shutdown_timeout_seconds: float = _setting(
        30.0, "Seconds that processes have to save after Ctrl-C before they are killed."
    )
    devices: tuple[int | str, ...] = _setting(
        (),
        "Accelerators of this node to use, such as 0,1; empty: all visible ones.",
        brief="Accelerators to use, such as 0,1",
    )
    threads_per_process: int | None = _setting(
        None,
        "OMP_NUM_THREADS of each process; unset: the environment's value, else with several processes 1, "
        "or as many as the cores that each is bound to.",
    )
    bind: CoreBindingMode = _setting(  # noqa: RUF009 it returns a field
        "none", "Cores of each process: none (any) or auto (its own, on the NUMA node of its accelerator)."
    )
    module: bool = _setting(
        False,
        "Whether the script is the name of a module; -m for short, as with python.",
        brief="SCRIPT is a module's name; -m for short",
    )
    program: bool = _setting(False, "Whether the script is a program to start without Python.")
    through: str | None = _setting(
        None,
        "Module that runs the script, as python -m MODULE SCRIPT ARGUMENTS; --as-accelerate is short for "
        "drivetrain_accelerate, with which a script written for Hugging Face Accelerate runs.",
    )
    preload: tuple[str, ...] = _setting(
        (),
        "Modules to import once on each node, such as torch, in a process that the ranks are forked off, "
        "at the start and at each restart; empty: each rank is a fresh interpreter.",
    )
    log_dir: Path | None = _setting(  # noqa: RUF009 it returns a field
        None,
        "Folder for the output of each process, in addition to the terminal.",
        brief="Folder for the output of each process",
    )
    prefix: OutputPrefix = _setting(  # noqa: RUF009 it returns a field
        "others",
        "Lines that begin with their rank, with several processes: those of the ranks other than 0, all, "
        "or none, where each process writes to the launcher's own output.",
    )
    show_ranks: tuple[int, ...] = _setting(
        (), "Ranks whose output is shown, such as 0 or 0,8; empty: all. --log-dir keeps the others'."
    )
    tail: int | None = _setting(
        None,
        "Number of last lines of the failed rank to show again before its traceback; unset: 20 if its "
        "output is not shown, else 0.",
    )

    @property
    def target_kind(self) -> Literal["script", "module", "program"]:
        """The kind of target to run."""
        return "module" if self.module else "program" if self.program else "script"

    def __post_init__(self) -> None:
        """Check every field; the message of a ValueError begins with the field's name."""
        for name, kind in _CHOICES.items():
            *words, last = get_args(kind)
            if (value := getattr(self, name)) not in (*words, last):
                raise ValueError(f"{name}={value!r}: say {', '.join(words)} or {last}")
        for name, least in _LEAST.items():
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"{name}={value!r}: must be at least {least}")
        for name in _SECONDS:
            if not 0 < (value := getattr(self, name)) < float("inf"):
                raise ValueError(f"{name}={value!r}: a finite number of seconds above 0 is allowed")
        if any(rank < 0 for rank in self.show_ranks):
            raise ValueError(f"show_ranks={self.show_ranks!r}: ranks count from 0")
        if self.master_port is not None and not 0 <= self.master_port < 2**16:
            raise ValueError(f"master_port={self.master_port!r}: must lie between 0 (any free one) and 65535")
        if self.module and self.program:
            raise ValueError("module=True: program=True is set too; a script is either a module or a program")
        if self.through is not None and self.program:
            raise ValueError(
                f"through={self.through!r}: program=True is set too; a module runs scripts and modules of Python only"
            )
        nodes, total, of_node = self.num_nodes, self.num_processes, self.processes_per_node
        if self.min_nodes is not None and self.min_nodes > nodes:
            raise ValueError(f"min_nodes={self.min_nodes!r}: num_nodes={nodes} is the most that take part")
        if self.node_rank is not None and not 0 <= self.node_rank < nodes:
            raise ValueError(
                f"node_rank={self.node_rank!r}: with num_nodes={nodes} it counts from 0 to {nodes - 1}"
            )
        if total is not None and total % nodes:
            raise ValueError(
                f"num_processes={total!r}: counts the processes of all nodes together, and cannot be split evenly "
                f"over num_nodes={nodes}; say a multiple, or processes_per_node"
            )
        if total is not None and of_node is not None and total != of_node * nodes:
            raise ValueError(
                f"num_processes={total!r}: processes_per_node={of_node} on {nodes} nodes makes {of_node * nodes}; "
                "say one of the two"
            )
