"""Start a function, not a script, on several processes: from a notebook, or to try a loop on a laptop."""

import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from tempfile import TemporaryDirectory
from typing import Any

from drivetrain_config import environ
from drivetrain_launcher.errors import LaunchError, RankFailedError
from drivetrain_launcher.failures import describe_root, read_failure
from drivetrain_launcher.host import look_at_host
from drivetrain_launcher.saying import say, torch_silenced


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    *,
    mixed_precision: str | None = None,
    master_port: int = 0,
) -> list[Any]:
    """Run a function on several processes of this machine, from a notebook or an interpreter.

    The processes are forked, so the function and its arguments need not be importable. A fork cannot use an
    accelerator that its parent has used: import and define what you like, but use the device in `function` only.

    Args:
        function: Called as `function(*args)` on each process.
        args: Its arguments.
        num_processes: How many; None for one on each accelerator, or one. One runs in this process.
        mixed_precision: What the processes' `run` section says, unless their code says another.
        master_port: Where they meet; 0 for any free port.

    Returns:
        What the function returned, in rank order.

    Raises:
        LaunchError: The accelerator is in use already, or there are fewer of them than processes.
        RankFailedError: A rank failed; the message shows its traceback.
    """
    host = look_at_host("auto")
    count = num_processes or max(1, host.accelerator_count)
    if host.accelerator is not None and count > host.accelerator_count:
        raise LaunchError(
            f"num_processes={count}: this machine has {host.accelerator_count} {host.accelerator} devices to give "
            f"them; say at most {host.accelerator_count}, or use debug_launcher, which trains on the CPU"
        )
    said = {} if mixed_precision is None else {"DRIVETRAIN_RUN__MIXED_PRECISION": mixed_precision}
    if count == 1:
        with environ.exported(**said):
            return [function(*args)]
    if host.accelerator is not None:
        _check_unused(host.accelerator)
    return _start(function, args, count, said, master_port)


def debug_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2
) -> list[Any]:
    """Run a function on several processes on the CPU, to see whether it works on more than one.

    Args:
        function: Called as `function(*args)` on each process.
        args: Its arguments.
        num_processes: How many.

    Returns:
        What the function returned, in rank order.

    Raises:
        RankFailedError: A rank failed; the message shows its traceback.
    """
    return _start(function, args, num_processes, {"DRIVETRAIN_STATE__DEVICE": "cpu"}, 0)


def _check_unused(kind: str) -> None:
    """Refuse to fork a process whose accelerator is initialised: its driver does not survive a fork."""
    import torch

    is_initialized = getattr(getattr(torch, kind, None), "is_initialized", None)
    if is_initialized is not None and is_initialized():
        raise LaunchError(
            f"the {kind} device was used in this process already, and a fork of it cannot use it again: restart the "
            "notebook, and touch the device (tensor.to, model.cuda, Accelerator()) in the launched function only"
        )


def _start(
    function: Callable[..., Any], args: Sequence[Any], count: int, said: dict[str, str], master_port: int
) -> list[Any]:
    if sys.platform == "win32":
        raise LaunchError(
            "functions are launched by fork, which Windows does not have: use drivetrain launch SCRIPT"
        )
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, start_processes

    from drivetrain_launcher.rendezvous import OneNode

    # The store lives in this process, so that its port is known and taken before a rank starts.
    meeting = OneNode("127.0.0.1", master_port, "none").next_rendezvous()
    place = meeting.bootstrap_store_info
    assert place is not None
    ranks = range(count)
    all_forked = multiprocessing.get_context("fork").Event()
    with TemporaryDirectory(prefix="drivetrain_") as scratch, _signals_restored(), torch_silenced():
        context = start_processes(
            name="rank",
            entrypoint=_call,
            args={rank: (all_forked, function, tuple(args)) for rank in ranks},
            envs={rank: {**_environment(rank, count, place.master_port), **said} for rank in ranks},
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
            start_method="fork",
        )
        all_forked.set()
        try:
            result = context.wait(period=0.05)
        except SignalException as stop:
            say(f"{stop.sigval.name}: stopping {count} ranks, which have 30 s to save")
            context.close(stop.sigval, 30)
            raise KeyboardInterrupt from None
    assert result is not None  # it waits without a limit
    if result.failures:
        rank, failure = min(result.failures.items(), key=lambda item: item[1].timestamp)
        root = read_failure(
            failure.error_file_data,
            rank=rank,
            local_rank=rank,
            pid=failure.pid,
            exit_code=failure.exitcode,
            seen=float(failure.timestamp),
        )
        raise RankFailedError(describe_root(root, num_nodes=1))
    return [result.return_values[rank] for rank in ranks]


def _call(all_forked: Event, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What each process runs.

    It waits until all are forked: where one connects, the store's thread in the parent looks up its name under a lock
    of the C library, and a process forked meanwhile would inherit that lock held, and wait at its own first lookup.
    """
    import torch

    all_forked.wait()
    torch.set_num_threads(1)  # a fork has no OpenMP threads left of its parent's, and would wait for them
    return function(*args)


def _environment(rank: int, count: int, port: int) -> dict[str, str]:
    """The variables of torchrun for a rank of one node."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


@contextmanager
def _signals_restored() -> Generator[None]:
    """Give back the signal handlers that torch replaces while it watches processes."""
    names = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT]
    if threading.current_thread() is not threading.main_thread():
        names = []
    before = {name: signal.getsignal(name) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
