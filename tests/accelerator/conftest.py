"""The accelerator of `device.py` in processes of their own: torch knows a new device for good."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accelerator import device
from processes import RankPool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of this folder time to compile the device, and leave them out where it cannot be."""
    skipped = pytest.mark.skipif(not device.CAN_BE_MADE, reason="wants a C++ compiler and ninja")
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(600))
            item.add_marker(pytest.mark.costly)
            item.add_marker(skipped)


@pytest.fixture(scope="package")
def accelerated_pools() -> Iterator[dict[int, RankPool]]:
    """The processes with the device, by how many there are; each pool is started at its first use."""
    device.compiled()
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def on_accelerators(
    accelerated_pools: dict[int, RankPool], pythons: tuple[str, ...]
) -> Callable[..., list[object]]:
    """Call a module-level function on every rank of processes with the device; see `run_ranks`.

    Rank 0 computes on the first device, rank 1 on the second. One process has no group.
    """

    def run(
        function: Callable[..., object], *args: object, num_processes: int = 1, timeout_seconds: float = 120
    ) -> list[object]:
        pool = accelerated_pools.setdefault(
            num_processes, RankPool(num_processes, pythons=pythons, accelerated=True)
        )
        return pool.call(function, *args, timeout_seconds=timeout_seconds)

    return run
