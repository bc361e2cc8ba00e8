"""Fixtures that every package's tests share: pools of connected processes, and scripts run on several ranks."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from preloaded import PreloadedPython
from processes import Completed, RankPool, rank_environment, run_script

# Hundreds of processes start here. Where Python is told to keep no bytecode, each would compile torch for 3 seconds:
# theirs is kept beside the sources, out of sight.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(Path(__file__).parents[1] / "build" / "bytecode"))

# Machines differ and are shared: no example has a deadline, the whole test has pytest's.
settings.register_profile("drivetrain", deadline=None)
settings.load_profile("drivetrain")

_COMPILE = (
    "import os; os.environ['DS_ACCELERATOR'] = 'cpu'\n"
    "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder\n"
    "ShareMemCommBuilder().load()\n"
)


@pytest.fixture(scope="session")
def deepspeed_operators() -> None:
    """DeepSpeed's operator, compiled before any test waits for an answer: a minute the first time, then seconds."""
    subprocess.run([sys.executable, "-c", _COMPILE], check=True, timeout=170, capture_output=True)


@pytest.fixture(scope="session")
def python() -> Iterator[str]:
    """A program that stands for `python` and has imported torch before it starts; see preloaded.py."""
    python = PreloadedPython(rank_environment(0, 1, 0, {}))
    yield python.executable
    python.close()


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[dict[int, RankPool]]:
    """The pools of this session by their number of processes; each is started at its first use."""
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def run_ranks(rank_pools: dict[int, RankPool], python: str) -> Callable[..., list[object]]:
    """Call a module-level function on every rank of a gloo group of long-lived processes.

    `run_ranks(function, *args, num_processes=2, timeout_seconds=60)` returns the ranks' results in rank order.
    A rank that raises, dies or hangs fails the test with every rank's output and traceback.
    """

    def run(
        function: Callable[..., object], *args: object, num_processes: int = 2, timeout_seconds: float = 60
    ) -> list[object]:
        pool = rank_pools.setdefault(num_processes, RankPool(num_processes, python=python))
        return pool.call(function, *args, timeout_seconds=timeout_seconds)

    return run


@pytest.fixture
def run_ranks_script(tmp_path: Path, python: str) -> Callable[..., list[Completed]]:
    """Run Python source as a process of its own per rank (torchrun's variables set), for tests that kill or hang."""

    def run(
        source: str,
        *args: str,
        num_processes: int = 2,
        timeout_seconds: float = 90,
        environment: dict[str, str] | None = None,
    ) -> list[Completed]:
        script = tmp_path / "script.py"
        script.write_text(source)
        return run_script(
            script,
            *args,
            num_processes=num_processes,
            timeout_seconds=timeout_seconds,
            environment=environment or {},
            python=python,
        )

    return run
