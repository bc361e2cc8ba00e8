"""A `python` that starts at once: its processes are forked off one that has imported torch.

A fresh interpreter spends some seconds of a core on torch and on what is ours, and the tests start hundreds. What
`PreloadedPython.executable` runs has that path as its own `sys.executable`, so that a launcher's ranks start the same
way. Where only a fresh interpreter will do, because of its flags or of variables that an import here has read, it is
one.

    server     imports, then forks a keeper for each process that is asked for; a second one, forked off it, has
               libraries too
    keeper     forks the process, hands it signals, tells the shim how it ended; it is the process's parent
    process    has the shim's arguments, variables, folder and open files, and the server's hash seed and limits
    shim       the program that was started in place of `python` (preloaded_shim.py); ends as the process does
"""

import atexit
import builtins
import fcntl
import gc
import importlib
import importlib.util
import io
import marshal
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.machinery import SourceFileLoader
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

# What ranks import: torch, torch._dynamo at an optimizer's first step, and what is installed of ours and of numpy.
IMPORTS = [
    "torch", "torch._dynamo", "numpy", "drivetrain_state.connection", "drivetrain_checkpoint.saving.coordinator",
    "drivetrain_checkpoint.loading.collective_load", "drivetrain_backends.ddp.backend",
    "drivetrain_backends.composed.single_device",
    "drivetrain_backends.fsdp.backend", "drivetrain_launcher.cli.main", "drivetrain_launcher.run.elastic",
    "drivetrain.accelerator.accelerator",
]  # fmt: skip
# What ranks of many tests import too, each for seconds of its own.
LIBRARIES = ["transformers.models.gpt2.modeling_gpt2", "drivetrain_megatron.library"]
# No import above reads them: with others of these, a forked process is as good as a fresh one.
_READ_LATE = (
    "DRIVETRAIN_", "TEST_", "PYTEST_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "OMP_NUM_THREADS", "PYTHONPATH", "PYTHONUNBUFFERED", "COLUMNS", "LINES",
    "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR", "TMPDIR",
    "FSDP_CPU_RAM_EFFICIENT_LOADING", "_MLFLOW_",  # set by accelerate and mlflow as they are imported
)  # fmt: skip
FRESH = b"fresh..."  # the answer to an order for which only a fresh interpreter will do
_SHIM = Path(__file__).with_name("preloaded_shim.py")
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class PreloadedPython:
    """The process that others are forked off; it imports at once, in the background.

    Args:
        environment: Its variables.
        with_libraries: Whether it forks another that imports `LIBRARIES` too.

    Attributes:
        executable: The path of the program that stands for `python`.
        executable_with_libraries: The path of the one that has imported `LIBRARIES`; the same without that process.
    """

    def __init__(self, environment: Mapping[str, str], *, with_libraries: bool = False) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="python-")
        programs = [self._program(name) for name in ("torch", "libraries")[: 1 + with_libraries]]
        self.executable, self.executable_with_libraries = programs[0][0], programs[-1][0]
        words = [word for executable, server in programs for word in (str(server.fileno()), executable)]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *words],
            env=dict(environment),
            stdin=subprocess.PIPE,  # the process ends when this does
            stdout=subprocess.DEVNULL,
            pass_fds=[server.fileno() for _, server in programs],
        )
        for _, server in programs:
            server.close()

    def _program(self, name: str) -> tuple[str, socket.socket]:
        """Write the program that stands for `python`; return its path and the socket that it asks."""
        folder = Path(self._folder.name, name)
        folder.mkdir()
        executable = folder / "python"
        # Isolated and without site-packages, it starts in some milliseconds.
        executable.write_text(f"#!{sys.executable} -IS\n{_SHIM.read_text()}")
        executable.chmod(0o700)
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(folder / "socket"))
        server.listen()
        return str(executable), server

    def close(self) -> None:
        """End the process; what it has forked goes on without it."""
        self._process.communicate()
        self._folder.cleanup()


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A process that is wanted, as a program's start describes it.

    Attributes:
        arguments: What stands behind `python`.
        folder: The working folder.
        environment: The variables.
        files: The open files, by the number that each is to have.
    """

    arguments: Sequence[str]
    folder: str
    environment: Mapping[str, str]
    files: Mapping[int, int]

    def needs_fresh_interpreter(self, started_with: Mapping[str, str]) -> bool:
        """Whether its flags are not known here, or something imported here has read another variable."""
        words = [word for word in self.arguments if word != "-u"]
        is_known = bool(words) and (words[0] in ("-m", "-c") or not words[0].startswith("-"))
        differing = {name for name, _ in started_with.items() ^ self.environment.items()}
        return not is_known or not all(name.startswith(_READ_LATE) for name in differing)


def serve(server: socket.socket, started_with: Mapping[str, str]) -> Order:
    """Fork a keeper for each connection until stdin ends; comes back in each process that is to run."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a keeper
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the shims have it
    while sys.stdin.fileno() not in wait([server, sys.stdin.fileno()]):
        shim, _ = server.accept()
        if not os.fork():
            server.close()
            return _keep(shim, started_with)
        shim.close()
    os._exit(0)


def _keep(shim: socket.socket, started_with: Mapping[str, str]) -> Order:
    """Fork the process of an order, hand signals on to it, tell how it ends; comes back in that process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    order = receive(shim)
    if order is None:
        os._exit(0)
    if order.needs_fresh_interpreter(started_with):
        shim.sendall(FRESH)
        os._exit(0)
    pid = os.fork()
    if not pid:
        shim.close()
        return order
    for file in order.files.values():
        os.close(file)
    end = os.pidfd_open(pid)
    while end not in select.select([shim, end], [], [])[0]:
        for number in shim.recv(1) or [signal.SIGKILL]:  # nothing: the shim was killed
            os.kill(pid, number)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(OSError):
        shim.sendall(code.to_bytes(8, "little", signed=True))
    os._exit(0)


def receive(shim: socket.socket) -> Order | None:
    """Read an order, and leave what comes behind it; None if the shim has ended."""
    size, files, _, _ = socket.recv_fds(shim, 8, 64)
    text = b""
    # And no more than these: signals come behind them.
    while missing := int.from_bytes(size, "little") - len(text):
        if not (part := shim.recv(min(missing, 1 << 16))):
            return None
        text += part
    if not text:
        return None
    arguments, folder, environment, numbers = marshal.loads(text)
    return Order(
        arguments=arguments,
        folder=folder,
        environment=environment,
        files=dict(zip(numbers, files, strict=True)),
    )


def become(order: Order, executable: str) -> NoReturn:
    """Be the process that `order` asks for, to the end of its script, module or code."""
    os.setsid()  # what is typed at the terminal goes to the shim
    _take(order.files)
    os.chdir(order.folder)
    search = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(order.environment)
    tempfile.tempdir = None  # which an import has asked for
    sys.path[1:] = [path for path in sys.path[1:] if path not in search]
    sys.path[1:1] = filter(None, order.environment.get("PYTHONPATH", "").split(os.pathsep))
    if "TEST_FRESH_RANKS" not in order.environment:  # else what it starts are its own children
        sys.executable = executable
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "torch" in sys.modules:
        # Before a second thread does: of two at once after a fork, torch loses its pool of threads.
        sys.modules["torch"].set_num_threads(int(order.environment.get("OMP_NUM_THREADS", 1)))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # as in every fresh process; Python's own is seeded anew at a fork
    importlib.invalidate_caches()
    words = list(order.arguments)
    unbuffered = words[0] == "-u"
    words = words[unbuffered:]
    if unbuffered or order.environment.get("PYTHONUNBUFFERED"):
        # As Python's own, they leave the file open when something takes their place.
        out, err = (open(number, "wb", 0, closefd=False) for number in (1, 2))  # noqa: SIM115
        sys.stdout = io.TextIOWrapper(out, write_through=True)
        sys.stderr = io.TextIOWrapper(err, errors="backslashreplace", write_through=True)
    try:
        _run(words)
    except SystemExit as end:
        code = end.code & 0xFF if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 shown, as Python does
        # Python keeps what it shows, and a watchdog tells other ranks of it.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(*sys.exc_info())
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    else:
        code = 0
    _end(code)


def _end(code: int) -> NoReturn:
    """End as Python does, but without freeing what modules hold, which copies every page and costs 20 forks."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _take(files: Mapping[int, int]) -> None:
    """Give each open file the number it is to have."""
    aside = {number: fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 1000) for number, file in files.items()}
    for file in files.values():
        os.close(file)
    for number, file in aside.items():
        os.dup2(file, number)
        os.close(file)


def _run(words: list[str]) -> None:
    """Run `SCRIPT ...`, `-m MODULE ...` or `-c CODE ...` as this process's own program."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    namespace = vars(main)
    namespace.update(__builtins__=builtins, __annotations__={}, __loader__=None, __cached__=None)
    sys.excepthook = partial(_show, sys.excepthook, namespace)
    if words[0] == "-m":
        sys.argv, sys.path[0] = ["-m", *words[2:]], os.getcwd()
        runpy._run_module_as_main(words[1])  # what `python -m` calls
    elif words[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *words[2:]], ""
        exec(compile(words[1], "<string>", "exec"), namespace)
    else:
        sys.argv, sys.path[0] = words, os.path.dirname(os.path.abspath(words[0]))
        loader = SourceFileLoader("__main__", words[0])
        namespace.update(__file__=words[0], __loader__=loader)
        exec(loader.source_to_code(loader.get_data(words[0]), words[0]), namespace)


def _show(
    hook: Hook,
    namespace: dict[str, Any],
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
) -> None:
    """Show an exception as Python does, from the program's first frame on."""
    while traceback is not None and traceback.tb_frame.f_globals is not namespace:
        traceback = traceback.tb_next
    hook(kind, error.with_traceback(traceback), traceback)


def _import(names: Sequence[str]) -> None:
    """Import what is installed of `names`, out of sight of every later collection of garbage."""
    for name in names:
        package = importlib.util.find_spec(name.partition(".")[0])
        # A package may be tried alone. Folders of tests have names of packages too, without an __init__.py.
        if package is not None and package.origin is not None:
            with suppress(ImportError):  # of ours whose own library is missing
                importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would leave this process's other threads behind"
    gc.collect()
    gc.freeze()  # no process collects what it shares with the others


if __name__ == "__main__":
    own_variables = dict(os.environ)  # torch._dynamo adds one
    _import(IMPORTS)
    program, other = sys.argv[1:3], sys.argv[3:]
    if other and not os.fork():
        program, other = other, program
        _import(LIBRARIES)
    if other:
        os.close(int(other[0]))
    become(serve(socket.socket(fileno=int(program[0])), own_variables), program[1])
