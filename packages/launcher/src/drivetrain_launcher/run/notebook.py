"""Run a function on several processes, from a notebook or to test a training loop on the CPU."""

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
from drivetrain_launcher.plan.host_detection import detect_host
from drivetrain_launcher.plan.launch_plan import LaunchPlan, LaunchTarget
from drivetrain_launcher.run.failures import describe_root, read_process_failure
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

    The processes are forked, so that the function and its arguments need not be importable. A forked process cannot
    use an accelerator that its parent has used: import and define anything, but use the device only in `function`.

    Args:
        function: The function, called as `function(*args)` on each process.
        args: The arguments of the function.
        num_processes: The number of processes; None for one per accelerator, or one if there is none. A single
            process is this one.
        mixed_precision: The `run.mixed_precision` setting of the processes, which their code may override.
        master_port: The port of the rendezvous; 0 for any free port.

    Returns:
        The return values of the function, in rank order.

    Raises:
        LaunchError: If the accelerator is already in use, there are fewer accelerators than processes, or
            `num_processes` is not an integer of at least 1.
        RankFailedError: If a rank fails; the message shows its traceback.
    """
    host = detect_host("auto")
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
    """Run a function on several CPU processes, to test that it works on more than one.

    Args:
        function: The function, called as `function(*args)` on each process.
        args: The arguments of the function.
        num_processes: The number of processes.

    Returns:
        The return values of the function, in rank order.

    Raises:
        LaunchError: If `num_processes` is not an integer of at least 1.
        RankFailedError: If a rank fails; the message shows its traceback.
    """
    _check_number(num_processes)
    return _start(function, args, num_processes, {"DRIVETRAIN_STATE__DEVICE": "cpu"}, 0)


def _check_number(num_processes: object) -> None:
    if type(num_processes) is not int or num_processes < 1:
        raise LaunchError(
            f"num_processes={num_processes!r}: must be an integer of at least 1, the processes to start"
        )


def _check_unused(kind: str) -> None:
    """Raise LaunchError if this process has initialised its accelerator, whose driver does not survive a fork."""
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
                envs=_environments(count, port, said),
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
    assert result is not None  # wait() without a timeout always returns a result
    _check(result)
    return [result.return_values[rank] for rank in ranks]


def _check(result: "RunProcsResult") -> None:
    """Raise the first failure, with its traceback.

    Raises:
        RankFailedError: If a rank failed.
    """
    if not result.failures:
        return
    rank, failure = min(result.failures.items(), key=lambda item: item[1].timestamp)
    raise RankFailedError(describe_root(read_process_failure(rank, failure), num_nodes=1))


@contextmanager
def _hosted_store(port: int) -> Generator[int]:
    """Run the block with the ranks' store hosted in this process; yield its port, bound before a rank starts.

    The store ends with the launch, even a failed one. Otherwise a kept exception, which references the frames it
    passed through, would keep the store; a later launch's ranks would inherit it without its thread, and could not
    free it.
    """
    from drivetrain_launcher.plan.agent_rendezvous import OneNode

    meeting = OneNode("127.0.0.1", port, "none").next_rendezvous()
    place = meeting.bootstrap_store_info
    assert place is not None
    try:
        yield place.master_port
    finally:
        del meeting


@contextmanager
def _garbage_kept() -> Generator[None]:
    """Run the block with all existing objects exempt from garbage collection in the processes that it forks.

    A rank also inherits its parent's garbage. Freeing some of it, such as a torch store, waits for a thread that does
    not exist in a forked process.
    """
    was_frozen = gc.get_freeze_count() > 0
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:  # the program has frozen objects itself, which must stay frozen
            gc.unfreeze()


def _call(launcher: int, all_forked: Event, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run the function in a forked process, once all processes are forked.

    When a process connects, the store's thread in the parent looks up its host name under a lock of the C library. A
    process forked at that moment would inherit the locked lock, and block at its own first lookup.
    """
    import torch

    watch_launcher(launcher)
    for number in _stop_signals():  # inherited from torch, whose handlers are for a launcher
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    all_forked.wait()
    torch.set_num_threads(1)  # the parent's OpenMP threads do not exist in a fork, which would wait for them
    return function(*args)


def _environments(count: int, port: int, said: dict[str, str]) -> dict[int, dict[str, str]]:
    """Return torchrun's environment variables, and others, for each rank on a single node."""
    target = LaunchTarget(name="a function")
    plan = LaunchPlan(
        mode="elastic", target=target, processes_per_node=count, master_port=port, environment=said
    )
    of_agent = {
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": plan.rdzv_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return {each.rank: {**each.environment, **of_agent} for each in plan.ranks()}


def _stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that torch handles while it monitors processes; some do not exist on Windows."""
    return signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT


@contextmanager
def _signals_restored() -> Generator[None]:
    """Run the block, then restore the signal handlers that torch replaces while it monitors processes."""
    names = _stop_signals()
    if threading.current_thread() is not threading.main_thread():
        names = ()
    before = {name: signal.getsignal(name) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
