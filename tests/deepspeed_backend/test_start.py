"""The first use on a machine, at which DeepSpeed compiles an operator."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
from drivetrain_backends import AccumulationWindow, DeepSpeedBackend
from drivetrain_precision import choose_policy
from drivetrain_state import StateSettings, connect

with connect(StateSettings(device="cpu"), needs_group=True) as context:
    before = context.progress.count
    DeepSpeedBackend(context, choose_policy("no", context.device), window=AccumulationWindow()).close()
    print("marks", context.progress.count - before, context.progress.label)
"""


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_compiling_the_operator_is_told_of_and_is_progress(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script)]
    run = subprocess.run(
        command,
        env=os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path / "empty")},
        capture_output=True,
        text=True,
        timeout=480,
        check=True,
    )
    assert "DeepSpeed compiles an operator for this machine, about a minute" in run.stderr
    assert f"kept in {tmp_path / 'empty'} (TORCH_EXTENSIONS_DIR)" in run.stderr
    marks, label = run.stdout.splitlines()[-1].removeprefix("marks ").split(" ", 1)
    assert int(marks) >= 1
    assert label == "DeepSpeed compiles an operator"
