"""Processes for tests: a pool of connected ranks that stays up, and one-off scripts; neither can hang a test."""

import ast
import ctypes
import gc
import importlib.util
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import SystemRandom
from tempfile import TemporaryDirectory
from types import CodeType, ModuleType
from typing import Any, cast

TESTS = Path(__file__).parent
TOOLS = TESTS.parent / "tools"  # both are on the path of the tests too, see pyproject.toml
MOST_GROUPS = 8  # of a pool's rank, see RankPool

# A rank that is stopped does not hear that its test's process has ended: the kernel kills what started the rank, and
# with that the rank. Linux alone does (PR_SET_PDEATHSIG); elsewhere ranks are not stopped.
_END_WITH_PARENT = partial(ctypes.CDLL(None).prctl, 1, signal.SIGKILL) if sys.platform == "linux" else None

SKIPPED = "skipped: "  # how the answer of a rank begins whose body was skipped


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank of a pool answers a call with.

    Attributes:
        has_raised: Whether the function raised.
        result: What it returned; None if it raised.
        output: What it printed, and the traceback of what it raised.
        num_groups: The number of process groups that the rank has now.
    """

    has_raised: bool
    result: object = None
    output: str = ""
    num_groups: int = 0


def _ports_of_this_lane() -> Iterator[int]:
    """Ports below those that the system gives to outgoing connections, without Ray's and torch's 29500."""
    lane = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = list(range(15_000 + lane % 8, 29_000, 8))
    SystemRandom().shuffle(ports)
    return cycle(ports)


_PORTS = _ports_of_this_lane()


def free_port() -> int:
    """A TCP port that was free a moment ago, and that no other lane is given, nor soon this one again."""
    for port in _PORTS:
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:  # in use
                continue
            return port
    raise AssertionError  # there is always a next one


def rank_environment(rank: int, num_processes: int, port: int, extra: dict[str, str]) -> dict[str, str]:
    """The variables that torchrun gives a rank of a single node."""
    return {
        **{
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("DRIVETRAIN_", "TORCHELASTIC", "PYTHONUNBUFFERED"))
        },
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(TESTS), str(TOOLS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        ).rstrip(os.pathsep),
        **extra,
    }


def environment_alone() -> dict[str, str]:
    """The variables of a process that is no rank: a rank's, without those that make it one."""
    names = {
        "GROUP_RANK",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "WORLD_SIZE",
    }
    return {name: value for name, value in rank_environment(0, 1, 0, {}).items() if name not in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """What one rank's process left: its exit code (negative: the signal that ended it) and its output."""

    rank: int
    returncode: int
    stdout: str
    stderr: str


def run_script(
    script: Path,
    *args: str,
    num_processes: int,
    timeout_seconds: float,
    environment: dict[str, str],
    pythons: Sequence[str],
) -> list[Completed]:
    """Run `script` once per rank; kill whatever is left at the deadline and fail with every rank's output."""
    port = free_port()
    environments = [rank_environment(rank, num_processes, port, environment) for rank in range(num_processes)]
    return run_processes(
        script, *args, environments=environments, timeout_seconds=timeout_seconds, pythons=pythons
    )


def run_processes(
    script: Path,
    *args: str,
    environments: Sequence[dict[str, str]],
    timeout_seconds: float,
    pythons: Sequence[str] = (sys.executable,),
) -> list[Completed]:
    """Run `script` in each environment with the Pythons in turn, or kill what still runs at the deadline and fail."""
    deadline = time.monotonic() + timeout_seconds
    with TemporaryDirectory() as folder:
        processes: list[subprocess.Popen[bytes]] = []
        outputs = [
            (Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")) for rank in range(len(environments))
        ]
        for rank, (environment, (stdout, stderr)) in enumerate(zip(environments, outputs, strict=True)):
            with stdout.open("w") as out, stderr.open("w") as err:
                processes.append(
                    subprocess.Popen(
                        [pythons[rank % len(pythons)], str(script), *args],
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                    )
                )
        late = [rank for rank, process in enumerate(processes) if not _ends(process, deadline)]
        for rank in late:
            processes[rank].kill()
        results = [
            Completed(rank=rank, returncode=process.wait(), stdout=_printed(stdout), stderr=_printed(stderr))
            for rank, (process, (stdout, stderr)) in enumerate(zip(processes, outputs, strict=True))
        ]
    if late:
        shown = "\n".join(f"--- rank {r.rank} (exit {r.returncode})\n{r.stdout}{r.stderr}" for r in results)
        raise AssertionError(f"ranks {late} still ran after {timeout_seconds} s and were killed\n{shown}")
    return results


def _ends(process: subprocess.Popen[bytes], deadline: float) -> bool:
    """Whether a process ends before a deadline of the monotonic clock."""
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _printed(file: Path) -> str:
    """What a rank printed."""
    return without_libraries(file.read_text())


def without_libraries(text: str) -> str:
    """What a process printed, without what libraries say of themselves."""
    text = text.partition("nanobind: leaked")[0]  # triton's last words where no collection frees it
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("[Gloo]"))  # gloo greets up to torch 2.9


class RankPool:
    """`num_processes` processes joined in one gloo group, started once and reused by many tests.

    Each idle gloo group wakes up a hundred times a second, and torch's meshes and DeepSpeed keep theirs: `rest` stops
    the processes until the next call, and ends those with more than `MOST_GROUPS`, which hold threads and memory.

    Args:
        num_processes: How many.
        pythons: The programs that start them, in turn.
        device: The device that they have beside the CPU, by its name in `hardware/devices.py`; one process has no
            group then.
    """

    def __init__(
        self, num_processes: int, *, pythons: Sequence[str] = (sys.executable,), device: str = ""
    ) -> None:
        self.num_processes = num_processes
        self._pythons = pythons
        self._device = device
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._num_groups = 0
        self._pids: list[int] = []  # of the ranks themselves, which may be forked elsewhere

    def call(self, function: Callable[..., object], *args: object, timeout_seconds: float) -> list[object]:
        """Call `function(*args)` on every rank and return the results in rank order."""
        if not self._connections:
            self._start()
            # Once they are joined; what forks the first of them has libraries to import.
            self._pids = cast("list[int]", self._answers(120))
        self._send(signal.SIGCONT)
        where = (Path(function.__code__.co_filename), function.__module__, function.__name__)
        call = pickle.dumps((*where, pickle.dumps(args)))
        for connection in self._connections:
            connection.send_bytes(call)
        return self._answers(timeout_seconds)

    def rest(self) -> None:
        """Call it where the pool may have nothing to do for long."""
        if self._num_groups > MOST_GROUPS:
            self.close()
        elif _END_WITH_PARENT is not None:
            self._send(signal.SIGSTOP)

    def _send(self, number: signal.Signals) -> None:
        for pid in self._pids:
            os.kill(pid, number)

    def close(self) -> None:
        """End every process of the pool."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes, self._connections, self._pids = [], [], []
        self._num_groups = 0

    def _start(self) -> None:
        port = free_port()
        for rank in range(self.num_processes):
            # A pool waits between tests as long as it takes: that is no hang.
            extra = {"DRIVETRAIN_STATE__WATCHDOG": "false", "TEST_DEVICE": self._device}
            environment = rank_environment(rank, self.num_processes, port, extra)
            ours, theirs = socket.socketpair()
            with theirs:  # a rank that ends before it is joined is heard at once
                file = theirs.fileno()
                command = [self._pythons[rank % len(self._pythons)], __file__, str(file)]
                self._processes.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        pass_fds=[file],
                        preexec_fn=_END_WITH_PARENT,
                    )
                )
            self._connections.append(Connection(ours.detach()))

    def _answers(self, timeout_seconds: float) -> list[object]:
        """What each rank returned, in rank order; the pool ends if one raised, died or gave no answer."""
        answers = self._collect(time.monotonic() + timeout_seconds)
        if any(answer is None or answer.has_raised for answer in answers):
            self.close()  # a group with a lost or failed rank is not one to go on with
            raise AssertionError(self._report(answers, timeout_seconds))
        self._num_groups = max(answer.num_groups for answer in answers if answer is not None)
        return [answer.result for answer in answers if answer is not None]

    def _collect(self, deadline: float) -> list[Answer | None]:
        answers: list[Answer | None] = [None] * self.num_processes
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), timeout=left):
                assert isinstance(ready, Connection)
                rank = waiting.pop(ready)
                try:
                    answers[rank] = Answer(*pickle.loads(ready.recv_bytes()))
                except EOFError:
                    answers[rank] = Answer(True, output=f"the process of rank {rank} died")
            if any(answer is not None and answer.has_raised for answer in answers):
                deadline = min(deadline, time.monotonic() + 3)  # the others may be waiting for it
        return answers

    def _report(self, answers: list[Answer | None], timeout_seconds: float) -> str:
        lines: list[str] = []
        for rank, answer in enumerate(answers):
            if answer is None:
                lines.append(f"--- rank {rank}: no answer within {timeout_seconds} s")
            else:
                lines.append(
                    f"--- rank {rank}: {'raised' if answer.has_raised else 'returned'}\n{answer.output}"
                )
        return "\n".join(lines)


def _load(path: Path, name: str) -> ModuleType:
    """The test module under the name it has in the pool's owner, so that its classes travel both ways."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    parents = name.split(".")[:-1]
    for depth in range(len(parents)):  # unpickling a class looks its module up from the top
        parent = ".".join(parents[: depth + 1])
        sys.modules.setdefault(parent, ModuleType(parent))
    sys.modules[name] = module
    if path.stem.startswith("test_"):
        exec(_with_told_values(path), vars(module))
    else:
        spec.loader.exec_module(module)
    return module


def _with_told_values(path: Path) -> CodeType:
    """Compile a test module so that its asserts tell the values that they compare, as pytest does in its process.

    pytest has kept what it compiled.
    """
    from _pytest.assertion.rewrite import PYC_TAIL, _read_pyc, get_cache_dir, rewrite_asserts

    if (kept := _read_pyc(path, get_cache_dir(path) / f"{path.stem}{PYC_TAIL}")) is not None:
        return kept
    source = path.read_bytes()
    tree = ast.parse(source)
    rewrite_asserts(tree, source, str(path))
    return compile(tree, path, "exec", dont_inherit=True)


def _noted_groups() -> list[Callable[[], Any]]:
    """Return the list of the groups that our backends create from now on: few tests close what they prepare.

    Each idle gloo group wakes up a hundred times a second, and pools that have run many tests would hold hundreds.
    The groups of torch's meshes and of DeepSpeed stay, since both remember theirs.
    """
    import torch.distributed as dist

    found: list[Callable[[], Any]] = []
    new_group = dist.new_group

    def noting(*args: Any, **kwargs: Any) -> Any:
        group = new_group(*args, **kwargs)
        is_in_it = isinstance(group, dist.ProcessGroup)  # this process
        if is_in_it and "drivetrain_backends" in sys._getframe(1).f_code.co_filename:
            found.append(weakref.ref(group))
        return group

    dist.new_group = noting
    return found


def _destroy(groups: list[Callable[[], Any]]) -> None:
    """Destroy the groups that a call left, in the order of their creation, and forget them."""
    import torch.distributed as dist

    for reference in groups:
        group = reference()
        if group is not None and dist.distributed_c10d._world.pg_map.get(group) is not None:
            dist.destroy_process_group(group)
    groups.clear()


def _share_device() -> None:
    """Where ranks have to share a device, let each be the only one of a node of its own, which takes the first."""
    from hardware.devices import here

    if here().num_devices() < int(os.environ["LOCAL_WORLD_SIZE"]):
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": os.environ["RANK"]}


def _serve(file: str) -> None:
    """A pool's worker: join the group, then answer calls until the pool hangs up."""
    import torch
    import torch.distributed as dist

    connection = Connection(int(file))
    if not os.environ["TEST_DEVICE"]:
        dist.init_process_group("gloo")
    else:
        from hardware.devices import here

        here().prepare()
        if os.environ["WORLD_SIZE"] != "1":
            _share_device()
            dist.init_process_group(here().collectives())
    joined = dist.is_initialized()
    connection.send_bytes(pickle.dumps((False, os.getpid())))
    left_groups = _noted_groups()
    num_modules = 0
    while True:
        try:
            path, module, name, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        if num_modules != len(sys.modules):
            # What was imported stays: no collection need look through it again, and DeepSpeed asks for one an engine.
            num_modules = len(sys.modules)
            gc.collect()
            gc.freeze()
        if left_groups:  # all ranks have answered the call before, so nobody uses its groups any more
            _destroy(left_groups)
            gc.collect()  # their threads end with them
        output = io.StringIO()
        torch.manual_seed(0)  # ranks draw the same numbers, whatever the calls before drew
        try:
            with redirect_stdout(output), redirect_stderr(output):
                result = getattr(_load(path, module), name)(*pickle.loads(args))
            assert dist.is_initialized() == joined, f"{name} left its pool without the group it was given"
            answer = (False, result, output.getvalue(), len(dist.distributed_c10d._world.pg_map))
        except BaseException as error:  # noqa: BLE001 whatever it was, the test is told and shows it
            if type(error) is getattr(sys.modules.get("_pytest.outcomes"), "Skipped", None):
                answer = (
                    False,
                    f"{SKIPPED}{error}",
                    output.getvalue(),
                    len(dist.distributed_c10d._world.pg_map),
                )
            else:
                answer = (True, None, output.getvalue() + traceback.format_exc())
        # Plain bytes: multiprocessing would hand tensors over as shared memory, which dies with the pool.
        connection.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    _serve(*sys.argv[1:])
