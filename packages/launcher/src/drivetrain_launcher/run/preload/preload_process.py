"""The process that ranks are forked off: imports modules, then forks a rank for each order of the launcher.

It runs the same command as a rank, and has no thread and no open accelerator, of which a fork would have only a part.
Each rank leads a session of its own, and has the variables, the outputs and the cores of its order. A rank that has
ended stays a zombie until the launcher knows of it: no other process can take its id and the launcher's signals.
"""

import gc
import os
import select
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from drivetrain_launcher.run.process_link import ProcessLink
from drivetrain_messages import format_count

# Files that are open once CUDA, ROCm or another runtime of accelerators works in a process.
_DEVICE_FILES = ("/dev/nvidia-uvm", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/davinci")
_THREAD_END_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """The order of a rank: all its variables, CPUs (empty for any), and file descriptors (None for the launcher's).

    `parent` is the id of the process that the rank was forked off.
    """

    parent: int
    environment: Mapping[str, str]
    cpus: Sequence[int]
    outputs: Sequence[int | None]


def serve(connection: socket.socket, modules: Sequence[str]) -> RankOrder:
    """Import modules and fork ranks until the launcher ends; return in each rank, with its order."""
    try:
        return _Parent(connection).serve(modules)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the launcher has died; its keeper knows the ranks


def become_rank(order: RankOrder) -> None:
    """Apply an order to this process, which was just forked, except for the environment."""
    if order.cpus:
        os.sched_setaffinity(0, order.cpus)
    for number, file in enumerate(order.outputs, start=1):
        if file is not None:
            os.dup2(file, number)
    for file in {file for file in order.outputs if file is not None}:
        os.close(file)
    if "numpy" in sys.modules:
        # All ranks would draw the same numbers. Python's own generator seeds itself anew after a fork.
        import numpy

        numpy.random.seed()


class _Parent:
    """The forked ranks, each with a handle."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._link = ProcessLink(connection)
        self._running: dict[int, int] = {}

    def serve(self, modules: Sequence[str]) -> RankOrder:
        self._link.send("ready", refusal=_import(modules))
        # What is imported stays: no rank's collector then touches, and thereby copies, its pages.
        gc.collect()
        gc.freeze()
        while True:
            readable, _, _ = select.select([self._connection, *self._running], [], [])
            for handle in self._running.keys() & {*readable}:
                # The rank stays a zombie until the launcher knows.
                ended = os.waitid(os.P_PIDFD, handle, os.WEXITED | os.WNOWAIT)
                assert ended is not None
                sign = -1 if ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED) else 1
                os.close(handle)
                self._link.send("ended", pid=self._running.pop(handle), exit_code=sign * ended.si_status)
            if self._connection not in readable:
                continue
            messages = self._link.receive()
            if messages is None:
                os._exit(0)
            for message in messages:
                if message["kind"] == "known":
                    os.waitpid(message["pid"], 0)
                elif (order := self._fork(message)) is not None:
                    return order

    def _fork(self, message: Mapping[str, Any]) -> RankOrder | None:
        """Fork a rank; return its order in the rank, None in this process."""
        files = [self._link.take_file() if has_file else None for has_file in message["outputs"]]
        parent = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else each rank would repeat what modules have written
        if (pid := os.fork()) == 0:
            os.setsid()
            self._link.send("started", pid=os.getpid())
            self._connection.close()
            for handle in self._running:
                os.close(handle)
            return RankOrder(
                parent=parent, environment=message["environment"], cpus=message["cpus"], outputs=files
            )
        self._running[os.pidfd_open(pid)] = pid
        for file in {file for file in files if file is not None}:
            os.close(file)
        return None


def _import(modules: Sequence[str]) -> str:
    """Import modules; return why ranks cannot be forked afterwards, or an empty text."""
    for name in modules:
        try:
            import_module(name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the launcher raises it
            return f"{name} cannot be imported here ({type(error).__name__}: {error})"
        if opened := open_accelerator():
            return f"importing {name} opens {opened}, and an accelerator cannot be used after a fork"
        # OpenBLAS, which knows of forks, ends its threads before one, and starts them again when they are needed. An
        # ended thread is listed for some moments.
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        deadline = time.monotonic() + _THREAD_END_SECONDS
        while (num_threads := len(os.listdir("/proc/self/task")) - 1) and time.monotonic() < deadline:
            time.sleep(0.005)
        if num_threads:
            threads = format_count(num_threads, "thread")
            return f"importing {name} starts {threads}, which a forked rank would lack"
    return ""


def open_accelerator(files: Path = Path("/proc/self/fd")) -> str:
    """Return the device file of an accelerator that is open in this process; empty if none is."""
    for file in files.iterdir():
        try:
            target = os.readlink(file)
        except OSError:  # the folder's own file
            continue
        if target.startswith(_DEVICE_FILES):
            return target
    return ""
