from typing import Any, ClassVar

import pytest

from drivetrain_backends import BackendContract
from drivetrain_state import StateSettings, connect
from drivetrain_xla import XLABackend, XLASettings


def check(settings: XLASettings) -> None:
    """Run every check, in float64 and within 1e-10 of the plain loop."""

    class Contract(BackendContract):
        backend = XLABackend
        modes = ("no", "bf16")  # XLA's devices have no fp16
        # What is computed again is refused, as test_training.py shows; XLA compiles by itself.
        cases: ClassVar[Any] = {
            name: case
            for name, case in BackendContract.cases.items()
            if not name.startswith(("recomputed", "compiled"))
        }

    Contract.settings = settings
    with connect(StateSettings(device="xla")) as context:
        done = set(Contract().check_all(context))
    assert {
        "check_gan",
        "check_resume",
        "check_nonfinite_gradients",
        "tied weights",
        "frozen layer",
        "bf16",
    } <= done


@pytest.mark.devices(1)
@pytest.mark.timeout(300)
def test_one_device_passes_the_contract() -> None:
    check(XLASettings())


@pytest.mark.devices(2, 4)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("spmd", ["data", "shard"])
def test_several_devices_pass_the_contract(spmd: str) -> None:
    check(XLASettings(spmd=spmd))
