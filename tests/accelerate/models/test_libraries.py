"""transformers, peft and Diffusers, which import `accelerate` by themselves, with the interface installed."""

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from hardware.simulated.device import CAN_BE_MADE

PROGRAMS = Path(__file__).with_name("programs")
TESTS = Path(__file__).parents[2]

needs_device = pytest.mark.skipif(not CAN_BE_MADE, reason="wants a C++ compiler and ninja")


def assert_runs(*command: str) -> None:
    path = os.pathsep.join(map(str, (TESTS, TESTS / "accelerate")))
    environment = {**os.environ, "PYTHONPATH": path}
    finished = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.splitlines()[-1] == "as without"


@pytest.mark.skipif(find_spec("transformers") is None, reason="wants transformers")
def test_models_of_transformers_compute_as_without_a_map(python: str, tmp_path: Path) -> None:
    assert_runs(python, "-m", "drivetrain_accelerate", str(PROGRAMS / "with_transformers.py"), str(tmp_path))


@pytest.mark.skipif(find_spec("peft") is None, reason="wants peft")
@pytest.mark.parametrize("where", ["cpu", pytest.param("npu", marks=[needs_device, pytest.mark.costly])])
@pytest.mark.timeout(400)  # the device is compiled first
@pytest.mark.slow
def test_adapters_of_peft_go_on_a_dispatched_base(where: str, python: str, tmp_path: Path) -> None:
    assert_runs(python, str(PROGRAMS / "with_peft.py"), str(tmp_path), *([where] if where == "npu" else []))


@pytest.mark.costly
@pytest.mark.timeout(400)
@needs_device
@pytest.mark.skipif(find_spec("diffusers") is None, reason="wants diffusers")
@pytest.mark.slow
def test_pipelines_of_diffusers_give_the_same_images(python: str, tmp_path: Path) -> None:
    assert_runs(python, str(PROGRAMS / "with_diffusers.py"), str(tmp_path))
