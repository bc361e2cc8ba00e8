"""Fixtures that every package's tests share: pools of connected processes, and scripts run on several ranks."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

from preloaded import PreloadedPython
from processes import Completed, RankPool, rank_environment, run_script

# Hundreds of processes start here. Where Python is told to keep no bytecode, each would compile torch for 3 seconds:
# theirs is kept beside the sources, out of sight.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(Path(__file__).parents[1] / "build" / "bytecode"))

# The lanes share the cores: the threads of more than one lane's operators would wait for each other in busy loops.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Machines differ and are shared: no example has a deadline, the whole test has pytest's.
settings.register_profile("drivetrain", deadline=None)
settings.load_profile("drivetrain")

_COMPILE = (
    "import os; os.environ['DS_ACCELERATOR'] = 'cpu'\n"
    "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder\n"
    "ShareMemCommBuilder().load()\n"
)


def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Begin to compile DeepSpeed's operator, which takes a minute the first time, while the lanes run other tests."""
    if find_spec("deepspeed") and any(
        Path(name).name in ("tests", "deepspeed_backend") for name in config.args
    ):
        command = [sys.executable, "-c", _COMPILE]
        compiler = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        config.add_cleanup(compiler.wait)


@pytest.fixture(autouse=True, scope="module")
def environment_as_before() -> Iterator[None]:
    """Remove the variables that libraries leave behind: with them no process could be forked, see preloaded.py."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session")
def deepspeed_operators() -> None:
    """DeepSpeed's operator, compiled before any test waits for an answer; tells why if it does not compile."""
    subprocess.run([sys.executable, "-c", _COMPILE], check=True, timeout=170, capture_output=True)


@pytest.fixture(scope="session")
def pythons() -> Iterator[tuple[str, ...]]:
    """Programs that stand for `python` and have imported torch before they start; see preloaded.py.

    Two, since what one forks has one hash seed: ranks that walk a set in the order of its hashes must not agree here.
    """
    if sys.platform != "linux":  # they hand open files on as /proc lists them, and wait by pidfd
        yield (sys.executable,)
        return
    preloaded = [PreloadedPython(rank_environment(0, 1, 0, {})) for _ in range(2)]
    yield tuple(each.executable for each in preloaded)
    for each in preloaded:
        each.close()


@pytest.fixture(scope="session")
def python(pythons: tuple[str, ...]) -> str:
    """One of `pythons`, to take in place of `sys.executable`."""
    return pythons[0]


@pytest.fixture(scope="session")
def all_rank_pools() -> Iterator[dict[int, RankPool]]:
    """The pools of this session by their number of processes; each is started at its first use."""
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="module")
def rank_pools(all_rank_pools: dict[int, RankPool]) -> Iterator[dict[int, RankPool]]:
    """The pools for the tests of a file; the next file may be one that needs none."""
    yield all_rank_pools
    for pool in all_rank_pools.values():
        pool.rest()


@pytest.fixture
def run_ranks(rank_pools: dict[int, RankPool], pythons: tuple[str, ...]) -> Callable[..., list[object]]:
    """Call a module-level function on every rank of a gloo group of long-lived processes.

    `run_ranks(function, *args, num_processes=2, timeout_seconds=60)` returns the ranks' results in rank order.
    A rank that raises, dies or hangs fails the test with every rank's output and traceback.
    """

    def run(
        function: Callable[..., object], *args: object, num_processes: int = 2, timeout_seconds: float = 60
    ) -> list[object]:
        pool = rank_pools.setdefault(num_processes, RankPool(num_processes, pythons=pythons))
        return pool.call(function, *args, timeout_seconds=timeout_seconds)

    return run


@pytest.fixture
def run_ranks_script(tmp_path: Path, pythons: tuple[str, ...]) -> Callable[..., list[Completed]]:
    """Run Python source as a process of its own per rank (torchrun's variables set), for tests that kill or hang.

    `fresh` ranks also end as Python ends, with all that modules hold.
    """

    def run(
        source: str,
        *args: str,
        num_processes: int = 2,
        timeout_seconds: float = 90,
        environment: dict[str, str] | None = None,
        fresh: bool = False,
    ) -> list[Completed]:
        script = tmp_path / "script.py"
        script.write_text(source)
        return run_script(
            script,
            *args,
            num_processes=num_processes,
            timeout_seconds=timeout_seconds,
            environment=environment or {},
            pythons=(sys.executable,) if fresh else pythons,
        )

    return run
