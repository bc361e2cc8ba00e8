"""Tests with torch-xla are run by `tools/check.py xla`, in envs/xla, once for each number of devices."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from drivetrain_xla import XLASettings
from optional_modules import is_installed

NUM_DEVICES = int(os.environ.get("CPU_NUM_DEVICES", "1"))


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", "devices(*numbers): wants torch-xla, and as many devices of it")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what wants torch-xla where it is not installed, and what wants another number of devices."""
    for item in items:
        if (marker := item.get_closest_marker("devices")) is None:
            continue
        if not is_installed("torch_xla"):
            item.add_marker(pytest.mark.skip(reason="tools/check.py xla runs these"))
        elif NUM_DEVICES not in marker.args:
            item.add_marker(pytest.mark.skip(reason=f"wants {marker.args} devices, not {NUM_DEVICES}"))


@pytest.fixture(autouse=True, scope="session")
def _xla_before_any_backward() -> None:
    """Begin XLA, with as many devices as there are: behind a backward, autograd would know no XLA device."""
    if is_installed("torch_xla"):
        from drivetrain import Accelerator

        Accelerator(backend="xla", sections={"state": {"device": "xla"}}).end_training()


class MakeAccelerator:
    """Make Accelerators on XLA's devices, and end each behind the test."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def __call__(self, spmd: str | None = None, **given: Any) -> Any:
        from drivetrain import Accelerator  # which tests of the package alone do without

        sections = {
            "state": {"device": "xla"},
            "xla": XLASettings(spmd=spmd),
            "model": given.pop("model", {}),
        }
        self.made.append(Accelerator(backend="xla", sections=sections, **given))
        return self.made[-1]


@pytest.fixture
def num_devices() -> int:
    """The number of XLA devices of this process."""
    return NUM_DEVICES


@pytest.fixture
def accelerator_on() -> Iterator[MakeAccelerator]:
    make = MakeAccelerator()
    yield make
    for accelerator in make.made:
        accelerator.end_training()
