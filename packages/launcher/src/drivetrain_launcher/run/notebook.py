"""Start a function, not a script, on several processes: from a notebook, or to try a loop on a laptop."""

import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from drivetrain_config import environ
from drivetrain_launcher.console import say, torch_silenced
from drivetrain_launcher.errors import LaunchError, RankFailedError
from drivetrain_launcher.plan.host import look_at_host
from drivetrain_launcher.run.failures import describe_root, read_failure
from drivetrain_launcher.run.parent_watch import watch_launcher

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.api import RunProcsResult


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
        LaunchError: The accelerator is in use already, or there are fewer of them than processes; or `num_processes`
            is no integer of at least 1.
        RankFailedError: A rank failed; the message shows its traceback.
    """
    host = look_at_host("auto")
    count = max(1, host.accelerator_count) if num_processes is None else num_processes
    _check_number(count)
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
        LaunchError: `num_processes` is no integer of at least 1.
        RankFailedError: A rank failed; the message shows its traceback.
    """
    _check_number(num_processes)
    return _start(function, args, num_processes, {"DRIVETRAIN_STATE__DEVICE": "cpu"}, 0)


def _check_number(num_processes: object) -> None:
    if type(num_processes) is not int or num_processes < 1:
        raise LaunchError(
            f"num_processes={num_processes!r}: must be an integer of at least 1, the processes to start"
        )


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

    ranks = range(count)
    launcher = os.getpid()
    all_forked = multiprocessing.get_context("fork").Event()
    with (
        TemporaryDirectory(prefix="drivetrain_") as scratch,
        _signals_restored(),
        torch_silenced(),
        _hosted_store(master_port) as port,
    ):
        with _garbage_kept():
            context = start_processes(
                name="rank",
                entrypoint=_call,
                args={rank: (launcher, all_forked, function, tuple(args)) for rank in ranks},
                envs={rank: {**_environment(rank, count, port), **said} for rank in ranks},
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
    _check(result)
    return [result.return_values[rank] for rank in ranks]


def _check(result: "RunProcsResult") -> None:
    """Raise what failed first, with its traceback.

    Raises:
        RankFailedError: A rank failed.
    """
    if not result.failures:
        return
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


@contextmanager
def _hosted_store(port: int) -> Generator[int]:
    """Host the ranks' store in this process, so that its port is known and taken before a rank starts.

    It ends with the launch, also with one that failed: an error that somebody keeps holds the frames it passed
    through, and a store that a later launch's ranks inherit cannot be freed there, for its thread is not.
    """
    from drivetrain_launcher.plan.rendezvous import OneNode

    meeting = OneNode("127.0.0.1", port, "none").next_rendezvous()
    place = meeting.bootstrap_store_info
    assert place is not None
    try:
        yield place.master_port
    finally:
        del meeting


@contextmanager
def _garbage_kept() -> Generator[None]:
    """Keep what exists now from being collected in processes that are forked meanwhile.

    A rank inherits the garbage of its parent as well. Some of it, such as a store of torch's, waits when it is freed
    for a thread that no fork has.
    """
    was_frozen = gc.get_freeze_count() > 0
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:  # else they are somebody's, and stay so
            gc.unfreeze()


def _call(launcher: int, all_forked: Event, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What each process runs.

    It waits until all are forked: where one connects, the store's thread in the parent looks up its name under a lock
    of the C library, and a process forked meanwhile would inherit that lock held, and wait at its own first lookup.
    """
    import torch

    watch_launcher(launcher)
    for number in _stop_signals():  # torch's handlers are those of a launcher, and were inherited
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
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


def _stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that torch handles while it watches processes; Windows has not all of them."""
    return signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT


@contextmanager
def _signals_restored() -> Generator[None]:
    """Give back the signal handlers that torch replaces while it watches processes."""
    names = _stop_signals()
    if threading.current_thread() is not threading.main_thread():
        names = ()
    before = {name: signal.getsignal(name) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
