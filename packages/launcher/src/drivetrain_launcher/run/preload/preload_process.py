"""The process that ranks are forked off: imports modules, then forks a rank for each order of the launcher.

It runs the same command as a rank, and starts no thread and no accelerator, of which a fork would have only a part.
Each rank leads a session of its own, and has the variables, the outputs and the cores of its order.
"""

import gc
import os
import select
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from drivetrain_launcher.run.process_link import ProcessLink


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """What the launcher says of a rank.

    Attributes:
        environment: Its environment variables, all of them.
        cpus: The CPUs to bind it to; empty for any.
        outputs: The file descriptors of its stdout and stderr; None for those of the launcher.
    """

    environment: Mapping[str, str]
    cpus: Sequence[int]
    outputs: Sequence[int | None]


def serve(connection: socket.socket, modules: Sequence[str], folder: str) -> RankOrder:
    """Import modules and fork ranks until the launcher ends.

    Args:
        connection: The connection to the launcher.
        modules: The names of the modules.
        folder: The folder from which the ranks' program imports first.

    Returns:
        The order of a rank, in that rank. In the process itself the call never returns.
    """
    link = ProcessLink(connection)
    link.send("ready", refusal=_import(modules, folder))
    # What is imported stays: no rank's collector then touches, and thereby copies, its pages.
    gc.collect()
    gc.freeze()
    handles: dict[int, int] = {}
    while True:
        readable, _, _ = select.select([connection, *handles], [], [])
        for handle in handles.keys() & {*readable}:
            pid, status = os.waitpid(handles.pop(handle), 0)
            os.close(handle)
            link.send("ended", pid=pid, exit_code=os.waitstatus_to_exitcode(status))
        if connection not in readable:
            continue
        messages = link.receive()
        if messages is None:  # the launcher has ended or died; its keeper knows the ranks
            os._exit(0)
        for message in messages:
            files = [link.take_file() if has_file else None for has_file in message["outputs"]]
            if (pid := os.fork()) == 0:
                connection.close()
                for handle in handles:
                    os.close(handle)
                return RankOrder(environment=message["environment"], cpus=message["cpus"], outputs=files)
            handles[os.pidfd_open(pid)] = pid
            for file in {*files} - {None}:
                os.close(file)
            link.send("started", pid=pid)


def take_place(order: RankOrder) -> None:
    """Make this process, which was just forked, the one that the order describes, but for its environment."""
    os.setsid()
    if order.cpus:
        os.sched_setaffinity(0, order.cpus)
    for number, file in enumerate(order.outputs, start=1):
        if file is not None:
            os.dup2(file, number)
    for file in {*order.outputs} - {None}:
        os.close(file)
    if "numpy" in sys.modules:
        # All ranks would draw the same numbers. Python's own generator seeds itself anew after a fork.
        import numpy

        numpy.random.seed()


def _import(modules: Sequence[str], folder: str) -> str:
    """Import modules; return why ranks cannot be forked afterwards, or an empty text."""
    for name in modules:
        try:
            import_module(name)
        except Exception as error:  # noqa: BLE001 - the launcher raises it
            return f"{name} cannot be imported here ({type(error).__name__}: {error})"
        if (num_threads := len(os.listdir("/proc/self/task"))) > 1:
            return (
                f"importing {name} starts {num_threads - 1} thread{'s' if num_threads > 2 else ''}, which "
                "a forked rank would lack"
            )
    return _hidden(folder)


def _hidden(folder: str) -> str:
    """Return which file beside the program would be imported by it, were not a module of its name there already."""
    for file in sorted(Path(folder).iterdir()) if Path(folder).is_dir() else ():
        module = sys.modules.get(file.stem)
        is_module = file.suffix == ".py" or (file / "__init__.py").exists()
        origin = getattr(module, "__file__", None)
        if is_module and origin is not None and not Path(origin).is_relative_to(file.resolve()):
            return f"{file} would be imported in place of the {file.stem} that they import"
    return ""
