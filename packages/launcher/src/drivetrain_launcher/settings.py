"""The `launch` section: the number of processes and nodes, and their rendezvous."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

RendezvousBackend = Literal["static", "c10d"]
OutputPrefix = Literal["others", "all", "none"]
CoreBindingMode = Literal["none", "auto"]

# The default port for the rendezvous of several nodes, as in torchrun.
DEFAULT_PORT = 29500


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """The `launch` section, with field names as in torchrun and Accelerate."""

    num_processes: int | None = field(
        default=None,
        metadata={
            "ask": "drivetrain_launcher.launch_advice:ask_num_processes",
            "help": "Number of processes on all nodes together; unset: one per visible accelerator, or one "
            "without any.",
        },
    )
    processes_per_node: int | None = field(
        default=None, metadata={"help": "Number of processes on each node, instead of num_processes."}
    )
    num_nodes: int = field(
        default=1,
        metadata={
            "ask": "drivetrain_launcher.launch_advice:ask_num_nodes",
            "help": "Number of machines; start the launcher on each. Elastic with --num-nodes MIN:MAX, such as 1:4, "
            "or with min_nodes too.",
        },
    )
    min_nodes: int | None = field(
        default=None,
        metadata={
            "help": "Fewest machines that an elastic run goes on with, up to num_nodes; requires c10d; unset: the "
            "number is fixed."
        },
    )
    node_silence_seconds: float = field(
        default=6.0,
        metadata={
            "help": "Seconds without a sign of life after which an elastic run goes on without a machine."
        },
    )
    node_rank: int | None = field(
        default=None,
        metadata={"help": "Rank of this machine among them, from 0; required with static rendezvous."},
    )
    master_addr: str | None = field(
        default=None,
        metadata={
            "ask": "drivetrain_launcher.launch_advice:ask_master_addr",
            "help": "Host name or address of the machine with node rank 0.",
        },
    )
    master_port: int | None = field(
        default=None,
        metadata={"help": "Port on master_addr; unset: any free port on one node, 29500 on several."},
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
    max_requeues: int | None = field(
        default=None,
        metadata={
            "help": "Maximum number of times that a cluster's job is started again after all ranks have saved on "
            "a signal; unset: no limit, 0: never."
        },
    )
    rdzv_backend: RendezvousBackend = field(
        default="static",
        metadata={
            "ask": "drivetrain_launcher.launch_advice:ask_rdzv_backend",
            "help": "Rendezvous of the nodes: static (node ranks are given) or c10d (nodes agree on their "
            "ranks).",
        },
    )
    rdzv_id: str | None = field(
        default=None,
        metadata={
            "ask": "drivetrain_launcher.launch_advice:ask_rdzv_id",
            "help": "Name of this run, the same on all nodes; required with c10d.",
        },
    )
    rdzv_timeout_seconds: float = field(
        default=900.0, metadata={"help": "Seconds that nodes wait for each other before the launch fails."}
    )
    max_restarts: int = field(
        default=0, metadata={"help": "Maximum number of restarts of all processes after a failure."}
    )
    monitor_interval_seconds: float = field(
        default=0.1, metadata={"help": "Seconds between two checks of the processes."}
    )
    shutdown_timeout_seconds: float = field(
        default=30.0,
        metadata={"help": "Seconds that processes have to save after Ctrl-C before they are killed."},
    )
    devices: tuple[int | str, ...] = field(
        default=(),
        metadata={"help": "Accelerators of this node to use, such as 0,1; empty: all visible ones."},
    )
    threads_per_process: int | None = field(
        default=None,
        metadata={
            "help": "OMP_NUM_THREADS of each process; unset: the environment's value, else with several processes 1, "
            "or as many as the cores that each is bound to."
        },
    )
    bind: CoreBindingMode = field(
        default="none",
        metadata={
            "help": "Cores of each process: none (any) or auto (its own, on the NUMA node of its accelerator)."
        },
    )
    module: bool = field(
        default=False,
        metadata={"help": "Whether the script is the name of a module; -m for short, as with python."},
    )
    program: bool = field(
        default=False, metadata={"help": "Whether the script is a program to start without Python."}
    )
    through: str | None = field(
        default=None,
        metadata={
            "help": "Module that runs the script, as python -m MODULE SCRIPT ARGUMENTS; --as-accelerate is short for "
            "drivetrain_accelerate, with which a script written for Hugging Face Accelerate runs."
        },
    )
    preload: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "Modules to import once on each node, such as torch, in a process that the ranks are forked off, "
            "at the start and at each restart; empty: each rank is a fresh interpreter."
        },
    )
    log_dir: Path | None = field(
        default=None,
        metadata={"help": "Folder for the output of each process, in addition to the terminal."},
    )
    prefix: OutputPrefix = field(
        default="others",
        metadata={
            "help": "Lines that begin with their rank, with several processes: those of the ranks other than 0, all, "
            "or none, where each process writes to the launcher's own output."
        },
    )
    show_ranks: tuple[int, ...] = field(
        default=(),
        metadata={
            "help": "Ranks whose output is shown, such as 0 or 0,8; empty: all. --log-dir keeps the others'."
        },
    )
    tail: int | None = field(
        default=None,
        metadata={
            "help": "Number of last lines of the failed rank to show again before its traceback; unset: 20 if its "
            "output is not shown, else 0."
        },
    )

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ValueError: If a value is outside its range; the message begins with the field's name.
        """
        if self.rdzv_backend not in get_args(RendezvousBackend):
            raise ValueError(f"rdzv_backend={self.rdzv_backend!r}: say static or c10d")
        if self.prefix not in get_args(OutputPrefix):
            raise ValueError(f"prefix={self.prefix!r}: say others, all or none")
        if self.bind not in get_args(CoreBindingMode):
            raise ValueError(f"bind={self.bind!r}: say none or auto")
        self._check_counts()
        self._check_seconds()
        if self.master_port is not None and not 0 <= self.master_port < 2**16:
            raise ValueError(f"master_port={self.master_port!r}: must lie between 0 (any free one) and 65535")
        if self.module and self.program:
            raise ValueError("module=True: program=True is set too; a script is either a module or a program")
        if self.through is not None and self.program:
            raise ValueError(
                f"through={self.through!r}: program=True is set too; a module runs scripts and modules of Python only"
            )
        if self.node_rank is not None and not 0 <= self.node_rank < self.num_nodes:
            last = self.num_nodes - 1
            raise ValueError(
                f"node_rank={self.node_rank!r}: with num_nodes={self.num_nodes} it counts from 0 to {last}"
            )

    def _check_counts(self) -> None:
        for name, least in (
            ("num_processes", 1),
            ("processes_per_node", 1),
            ("num_nodes", 1),
            ("min_nodes", 1),
            ("max_restarts", 0),
            ("max_requeues", 0),
            ("threads_per_process", 1),
            ("tail", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value!r}: must be at least {least}")
        if self.min_nodes is not None and self.min_nodes > self.num_nodes:
            raise ValueError(
                f"min_nodes={self.min_nodes!r}: num_nodes={self.num_nodes} is the most that take part"
            )
        if any(rank < 0 for rank in self.show_ranks):
            raise ValueError(f"show_ranks={self.show_ranks!r}: ranks count from 0")
        if self.num_processes is not None and self.num_processes % self.num_nodes:
            raise ValueError(
                f"num_processes={self.num_processes!r}: counts the processes of all nodes together, and cannot be "
                f"split evenly over num_nodes={self.num_nodes}; say a multiple, or processes_per_node"
            )
        if self.num_processes is not None and self.processes_per_node is not None:
            total = self.processes_per_node * self.num_nodes
            if self.num_processes != total:
                raise ValueError(
                    f"num_processes={self.num_processes!r}: processes_per_node={self.processes_per_node} on "
                    f"{self.num_nodes} nodes makes {total}; say one of the two"
                )

    def _check_seconds(self) -> None:
        for name in (
            "node_silence_seconds",
            "rdzv_timeout_seconds",
            "monitor_interval_seconds",
            "shutdown_timeout_seconds",
        ):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ValueError(f"{name}={value!r}: a finite number of seconds above 0 is allowed")
