"""The tests of what touches a device: each body runs on the simulated device, and on CUDA where there is a card.

`tools/cuda/run.py` runs this folder alone, where no more than torch and pytest need be installed.
"""

from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path

import pytest
import torch

from hardware.simulated.device import CAN_BE_MADE, compiled
from processes import RankPool

_MADE = pytest.mark.skipif(not CAN_BE_MADE, reason="wants a C++ compiler and ninja")
_KINDS = [
    pytest.param("simulated", marks=_MADE),
    pytest.param("as_tpu", marks=_MADE),
    *([pytest.param("cuda", marks=pytest.mark.cuda)] if torch.cuda.is_available() else []),
]

# Of those on the device played as a TPU.
_BY_DEFAULT = ("test_single_passes_the_contract[as_tpu]", "test_ddp_passes_the_contract[as_tpu-2]")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of this folder time to compile the simulated device, and those for a card alone its mark.

    Of the tests on the device played as a TPU, those that are not marked `as_tpu` are left out, and others are slow.
    """
    items[:] = [
        item for item in items if "[as_tpu" not in item.name or item.get_closest_marker("as_tpu") is not None
    ]
    for item in items:
        if item.path.parent == Path(__file__).parent:
            if "[as_tpu" in item.name and item.name not in _BY_DEFAULT:
                item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(600))
            item.add_marker(pytest.mark.costly)
            kind = item.get_closest_marker("only_on")
            if (
                kind is not None
                and kind.args == ("cuda",)
                and "device" not in getattr(item, "fixturenames", ())
            ):
                item.add_marker(pytest.mark.cuda)


@pytest.fixture(scope="package", params=_KINDS)
def device(request: pytest.FixtureRequest) -> str:
    """The device that the test's bodies have, by its name in `devices.py`."""
    if request.param != "cuda":
        compiled()
    return request.param


@pytest.fixture(autouse=True)
def only_on(request: pytest.FixtureRequest) -> None:
    """Skip a test that is marked `only_on(KIND, why=...)` on every other device, with the reason."""
    marker = request.node.get_closest_marker("only_on")
    if marker is None:
        return
    (kind,) = marker.args
    kinds = (
        [request.getfixturevalue("device")]
        if "device" in request.fixturenames
        else ["cuda" if torch.cuda.is_available() else ""]
    )
    if kind not in kinds:
        pytest.skip(f"only on {kind}: {marker.kwargs['why']}")


@pytest.fixture(scope="package")
def device_pools(device: str) -> Iterator[dict[int, RankPool]]:
    """The processes with the device, by how many there are; each pool is started at its first use."""
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The test's own folder, as its body in another process calls it."""
    return tmp_path


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Call a test that `runs_on_device` there, with the values of its fixtures and parameters."""
    body, given = pyfuncitem.function, pyfuncitem.funcargs
    for number in getattr(body, "num_processes", ()):
        arguments = [given[name] for name in signature(body).parameters]
        given["on_device"](body, *arguments, num_processes=number, timeout_seconds=body.timeout_seconds)
    return True if hasattr(body, "num_processes") else None


@pytest.fixture
def on_device(
    device: str, device_pools: dict[int, RankPool], pythons: tuple[str, ...]
) -> Callable[..., list[object]]:
    """Call a module-level function on every rank of processes with the device; see `run_ranks`.

    Rank 0 computes on the first device, rank 1 on the second, or both on the first if there is no second. One process
    has no group.
    """

    def run(
        function: Callable[..., object], *args: object, num_processes: int = 1, timeout_seconds: float = 120
    ) -> list[object]:
        pool = device_pools.setdefault(num_processes, RankPool(num_processes, pythons=pythons, device=device))
        return pool.call(function, *args, timeout_seconds=timeout_seconds)

    return run
