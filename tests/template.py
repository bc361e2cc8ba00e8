"""Ranks forked off one process that has imported torch, which costs each fresh interpreter some seconds.

    python template.py LISTENING_SOCKET

Every run is a connection. A keeper is forked for it, which forks the run's ranks, tells how they end, and kills those
that are left when it is told to or when the test is gone. A rank has variables, arguments and output of its own,
and ends as Python does. It has no thread of the template's, but its hash seed.
"""

import builtins
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.machinery import SourceFileLoader
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType, TracebackType

# What ranks import: torch, torch._dynamo at an optimizer's first step, and what is installed of ours and of numpy.
IMPORTS = [
    "torch", "torch._dynamo", "numpy", "drivetrain_state.connection", "drivetrain_checkpoint.saving.coordinator",
    "drivetrain_checkpoint.loading.collective_load", "drivetrain_backends.torch.ddp",
    "drivetrain_backends.torch.single_device",
]  # fmt: skip
# No import above reads them: a rank whose other variables are the template's is as good as a fresh interpreter.
_READ_LATE = ("DRIVETRAIN_", "TEST_", "PYTEST_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_RANK")
_POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A process that is wanted: a script with its arguments and variables, and the files that take its output."""

    script: Path
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    stdout: Path
    stderr: Path


# The exit code of each process, negative for a signal; and the places of those that had to be killed.
Ends = tuple[list[int], list[int]]
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class Template:
    """A process that forks ranks; it imports at once, in the background.

    Args:
        environment: Its variables.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._address = server.getsockname()
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(server.fileno())],
                env=environment,
                stdin=subprocess.PIPE,  # the template ends when this does
                stdout=subprocess.DEVNULL,
                pass_fds=[server.fileno()],
            )

    def suits(self, order: Order) -> bool:
        """Whether nothing that the template has imported would have read another variable in this process."""
        differing = {name for name, _ in self._environment.items() ^ order.environment.items()}
        return all(name.startswith(_READ_LATE) for name in differing)

    def run(self, orders: Sequence[Order], deadline: float) -> Ends:
        """Run processes to their end, or kill them at a deadline of the monotonic clock."""
        with Connection(socket.create_connection(self._address).detach()) as keeper:
            keeper.send((os.getcwd(), orders))
            if not keeper.poll(max(0.0, deadline - time.monotonic())):
                keeper.send("kill them")
            return keeper.recv()

    def close(self) -> None:
        """End the template, and with it what it keeps."""
        self._process.communicate()


def serve(server: socket.socket) -> Order:
    """Fork a keeper for each connection until stdin ends; comes back in each rank, with what it is to be."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a keeper
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test ends its ranks
    while sys.stdin.fileno() not in wait([server, sys.stdin.fileno()]):
        connection, _ = server.accept()
        if not os.fork():
            server.close()
            return _keep(Connection(connection.detach()))
        connection.close()
    os._exit(0)


def _keep(test: Connection) -> Order:
    """Fork a run's ranks, tell the test how they ended; comes back in each rank."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    folder, orders = test.recv()
    os.chdir(folder)
    places: dict[int, int] = {}
    for place, order in enumerate(orders):
        pid = os.fork()
        if not pid:
            test.close()
            return order
        places[pid] = place
    codes = [0] * len(orders)
    late: list[int] = []
    while places:
        if test.poll(_POLL_SECONDS):
            late = sorted(places.values())
            for pid in places:
                os.kill(pid, signal.SIGKILL)
        for pid in list(places):
            found, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if found:
                codes[places.pop(pid)] = os.waitstatus_to_exitcode(status)
    with suppress(OSError):
        test.send((codes, late))
    os._exit(0)


def become(order: Order) -> None:
    """Be the process that `order` asks for, to the end of its script."""
    os.environ.clear()
    os.environ.update(order.environment)
    files = [(Path(os.devnull), os.O_RDONLY), *((file, os.O_WRONLY) for file in (order.stdout, order.stderr))]
    for descriptor, (file, flags) in enumerate(files):
        opened = os.open(file, flags)
        os.dup2(opened, descriptor)
        os.close(opened)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "torch" in sys.modules:
        # Before a second thread does: of two at once after a fork, torch loses its pool of threads.
        sys.modules["torch"].set_num_threads(sys.modules["torch"].get_num_threads())
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # as in every fresh process; Python's own is seeded anew at a fork
    importlib.invalidate_caches()
    script = str(order.script)
    sys.argv, sys.path[0] = [script, *order.arguments], str(order.script.parent)
    main = sys.modules["__main__"] = ModuleType("__main__")
    loader = SourceFileLoader("__main__", script)
    vars(main).update(
        __builtins__=builtins, __annotations__={}, __file__=script, __cached__=None, __loader__=loader
    )
    sys.excepthook = partial(_show, sys.excepthook, vars(main))
    exec(loader.source_to_code(loader.get_data(script), script), vars(main))


def _show(
    hook: Hook,
    namespace: dict[str, object],
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
) -> None:
    """Show an exception as Python does, from the script's first frame on."""
    while traceback is not None and traceback.tb_frame.f_globals is not namespace:
        traceback = traceback.tb_next
    hook(kind, error.with_traceback(traceback), traceback)


if __name__ == "__main__":
    for name in IMPORTS:
        with suppress(ModuleNotFoundError):
            importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would leave the template's other threads behind"
    gc.collect()
    gc.freeze()  # no rank collects what it shares with the others
    become(serve(socket.socket(fileno=int(sys.argv[1]))))
