"""The engine on a device of its own memory, with streams and pinned memory: the checks of `accelerator_checks.py`."""

import subprocess
from pathlib import Path

import pytest

from hardware.simulated.device import CAN_BE_MADE

CHECKS = Path(__file__).with_name("accelerator_checks.py")


@pytest.mark.costly
@pytest.mark.undisturbed  # what is fetched ahead, and so the peak, depends on who else computes
@pytest.mark.timeout(400)  # the device is compiled first
@pytest.mark.skipif(not CAN_BE_MADE, reason="wants a C++ compiler and ninja")
@pytest.mark.parametrize("chosen", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_device_is_used_as_the_checks_say(python: str, chosen: str) -> None:
    """In a process of its own, since torch knows a new device for good."""
    command = [python, "-m", "pytest", "-q", "-m", chosen, str(CHECKS)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
