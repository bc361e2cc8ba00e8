"""Launch a function on several processes, with the arguments of Accelerate's launchers."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from drivetrain_accelerate.installation import CarriedInstallation, install, is_installed
from drivetrain_accelerate.states.partial_state import PartialState
from drivetrain_launcher import debug_launcher as launch_on_cpu
from drivetrain_launcher import notebook_launcher as launch_from_notebook


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: dict[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Run a function on several processes of this machine, each a fresh interpreter with this interface.

    A LaunchError refuses several machines and options of restarts and rendezvous. By default, `use_port` takes any
    free port. A RankFailedError shows the traceback of the rank that fails.
    """
    launch_from_notebook(
        _carry_interface(function),
        args,
        num_processes,
        mixed_precision=None if mixed_precision == "no" else mixed_precision,
        master_port=0 if str(use_port) == "29500" else int(use_port),
        master_addr=master_addr,
        node_rank=node_rank,
        num_nodes=num_nodes,
        rdzv_backend="static" if rdzv_backend == "c10d" else rdzv_backend,
        rdzv_endpoint=rdzv_endpoint,
        rdzv_conf=rdzv_conf,
        rdzv_id=rdzv_id,
        max_restarts=max_restarts,
        monitor_interval=monitor_interval,
        log_line_prefix_template=log_line_prefix_template,
    )


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Run a function on several CPU processes, to test that the function works with several ranks."""
    launch_on_cpu(_carry_interface(function), args, num_processes)


def test_launch() -> None:
    """Check that the ranks of this launch find each other: connect them. Called on all ranks."""
    PartialState()


def _carry_interface(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that first installs the interface in its process, if this process has the interface."""
    # The installation is unpickled first: the function's module may import accelerate.
    return partial(_call, CarriedInstallation(install), function) if is_installed() else function


def _call(installed: object, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)
