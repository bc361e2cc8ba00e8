"""What does not fit is refused, in a process of its own, since XLA begins once in each."""

import importlib.util
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from drivetrain_backends import BackendNotInstalledError
from drivetrain_config import Layers
from drivetrain_state.mesh import AXES
from drivetrain_xla import XLASettings
from drivetrain_xla.library import check_installed
from optional_modules import skip_without

HEAD = """
import torch
from drivetrain import Accelerator
def make(device="xla", **xla):
    return Accelerator(backend="xla", sections={"state": {"device": device}, "xla": xla})
"""


@pytest.fixture
def run(python: str) -> Callable[..., str]:
    """Run a program and return the last line of its errors."""
    skip_without("drivetrain")

    def run(program: str, **variables: str) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("XLA_")}
        finished = subprocess.run(
            [python, "-c", HEAD + program],
            env={**environment, **variables}, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert finished.returncode == 1, finished.stderr
        return finished.stderr.strip().splitlines()[-1]

    return run


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is not None, reason="torch-xla is installed")
def test_a_missing_library_is_named_with_the_torch_that_it_wants() -> None:
    with pytest.raises(
        BackendNotInstalledError, match=r"pip install 'torch==2\.9\.\*' 'torch-xla==2\.9\.\*'"
    ):
        check_installed()


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is not None, reason="torch-xla is installed")
def test_a_device_that_only_torch_xla_brings_is_refused(run: Callable[..., str]) -> None:
    message = run("make()")
    assert "has none that torch can use; install torch-xla (pip install 'torch==2.9.*'" in message


def test_axes_are_refused_with_what_xla_has_in_their_place(run: Callable[..., str]) -> None:
    message = run("Accelerator(backend='xla', sections={'parallel': {'tensor': 2}})")
    assert "tensor=2 under backend='xla': one process drives all devices" in message
    assert set(XLASettings.refused_axes) == {*AXES, "expert"}


def test_the_launcher_refuses_axes_before_any_process_starts() -> None:
    skip_without("drivetrain_launcher")
    from drivetrain_launcher import LaunchError
    from drivetrain_launcher.cli.preflight import check_parallel
    from drivetrain_launcher.plan.resolved_launch import resolve_launch

    layers = Layers.read(command_line={"run": {"backend": "xla"}, "parallel": {"tensor": "2"}})
    with pytest.raises(
        LaunchError, match=r"tensor=2 under backend='xla': .* say xla\.spmd=data to cut batches"
    ):
        check_parallel(resolve_launch(layers), 1)


def test_another_torch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of that name stands for one that was installed beside another torch."""
    (tmp_path / "torch_xla").mkdir()
    (tmp_path / "torch_xla" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch, "__version__", "2.15.0")
    with pytest.raises(
        BackendNotInstalledError, match=r"works with torch 2\.9 alone, and this is torch 2\.15\.0"
    ):
        check_installed()


def test_an_extension_that_does_not_load_is_an_error_of_the_device(
    run: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "torch_xla").mkdir()
    (tmp_path / "torch_xla" / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN5torch')")
    message = run("make()", PYTHONPATH=str(tmp_path))
    assert message.startswith("drivetrain_state.errors.DeviceError: torch-xla is installed and does not load")
    assert "undefined symbol: _ZN5torch. torch-xla 2.9 works with torch 2.9 alone: pip install" in message


@pytest.mark.devices(1, 2)
@pytest.mark.parametrize(
    ("program", "variables", "message"),
    [
        ("make('cpu')", {}, "backend='xla' on device 'cpu': say --state-device xla"),
        (
            "make()",
            {"PJRT_DEVICE": "TPU"},
            "PJRT_DEVICE=TPU, and torch-xla finds no such device: libtpu not found",
        ),
        (
            "torch.ones(2, requires_grad=True).sum().backward(); make()",
            {},
            "a backward has run in this process before its first tensor on XLA",
        ),
        (
            "import torch_xla; torch.ones(1, device='xla'); make(spmd='data')",
            {},
            "xla.spmd='data': a tensor was made on an XLA device before, after which SPMD cannot begin",
        ),
        (
            "make()",
            {"CPU_NUM_DEVICES": "banana"},
            "CPU_NUM_DEVICES=banana: must be a number of devices from 1",
        ),
        ("make()", {"CPU_NUM_DEVICES": "0"}, "CPU_NUM_DEVICES=0: must be a number of devices from 1 on"),
        ("make(spmd='data'); make(spmd='off')", {}, "xla.spmd='off': SPMD has begun in this process"),
    ],
)
def test_what_cannot_begin_says_what_would_do(
    run: Callable[..., str], program: str, variables: dict[str, str], message: str
) -> None:
    assert message in run(program, **variables)


@pytest.mark.devices(1, 2)
def test_a_seed_set_before_the_accelerator_is_that_of_xlas_generator(run: Callable[..., str]) -> None:
    program = (
        "torch.manual_seed(7); make(); import torch_xla.core.xla_model as x; exit(str(x.get_rng_state()))"
    )
    assert run(program) == "7"
