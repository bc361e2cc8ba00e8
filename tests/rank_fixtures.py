"""Tests on several ranks: bodies that run on each rank, functions called in a pool, scripts that run once a rank."""

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from preloaded import PreloadedPython
from processes import SKIPPED, Completed, RankPool, rank_environment, run_script

_PRELOADED = pytest.StashKey[tuple[str, ...]]()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give a test that is marked `ranks` the fixture that its body is called by."""
    if (
        isinstance(item, pytest.Function)
        and item.get_closest_marker("ranks")
        and "run_ranks" not in item.fixturenames
    ):
        item.fixturenames.append("run_ranks")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body of a test that is marked `ranks` on every rank: one that fails there fails with its traceback.

    Its arguments travel to the ranks as those of `run_ranks` do.
    """
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    (number,) = marker.args
    arguments = [pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.function).parameters]
    run_ranks = pyfuncitem.funcargs["run_ranks"]
    answers = run_ranks(pyfuncitem.function, *arguments, num_processes=number, **marker.kwargs)
    reasons = [each for each in answers if isinstance(each, str) and each.startswith(SKIPPED)]
    assert len(reasons) in (0, number), f"only some ranks skipped the test: {answers}"
    if reasons:
        pytest.skip(reasons[0].removeprefix(SKIPPED))
    return True


def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Start the programs that stand for `python` once for all lanes, as soon as it is known that there are lanes."""
    config.stash[_PRELOADED] = start_pythons(config)


def pytest_configure_node(node: Any) -> None:
    """Tell a lane which programs stand for `python`."""
    node.workerinput["pythons"] = node.config.stash[_PRELOADED]


def start_pythons(config: pytest.Config) -> tuple[str, ...]:
    """Start the programs that stand for `python`; they end with the run of tests that `config` describes.

    The last two stand for it in pools, whose ranks may have imported anything in the tests before: where whole
    folders that need `LIBRARIES` run, these have them.
    """
    if sys.platform != "linux":  # they hand open files on as /proc lists them, and wait by pidfd
        return (sys.executable,) * 4
    needed = any(Path(name).name in ("tests", "integration", "megatron") for name in config.args)
    preloaded = [PreloadedPython(rank_environment(0, 1, 0, {}), with_libraries=needed) for _ in range(2)]
    for each in preloaded:
        config.add_cleanup(each.close)
    return (
        *(each.executable for each in preloaded),
        *(each.executable_with_libraries for each in preloaded),
    )


@pytest.fixture(scope="session")
def all_pythons(pytestconfig: pytest.Config) -> tuple[str, ...]:
    """Four programs, see `start_pythons`."""
    shared = getattr(pytestconfig, "workerinput", {}).get("pythons")
    return tuple(shared) if shared else start_pythons(pytestconfig)


@pytest.fixture(scope="session")
def pythons(all_pythons: tuple[str, ...]) -> tuple[str, ...]:
    """Programs that stand for `python` and have imported torch before they start; see preloaded.py.

    Two, since what one forks has one hash seed: ranks that walk a set in the order of its hashes must not agree here.
    """
    return all_pythons[:2]


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
def run_ranks(rank_pools: dict[int, RankPool], all_pythons: tuple[str, ...]) -> Callable[..., list[object]]:
    """Call a module-level function on every rank of a gloo group of long-lived processes.

    `run_ranks(function, *args, num_processes=2, timeout_seconds=60)` returns the ranks' results in rank order.
    A rank that raises, dies or hangs fails the test with every rank's output and traceback.
    """

    def run(
        function: Callable[..., object], *args: object, num_processes: int = 2, timeout_seconds: float = 60
    ) -> list[object]:
        pool = rank_pools.setdefault(num_processes, RankPool(num_processes, pythons=all_pythons[2:]))
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
