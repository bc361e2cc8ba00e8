"""Run a program as it is, under the real Accelerate and under the interface, on one process or several."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).parent / "accelerate" / "programs"


def run_program(
    name: str, *arguments: str, ours: bool, num_processes: int = 1, options: tuple[str, ...] = ()
) -> Any:
    """Return what a program prints behind the word FOUND, as JSON.

    Args:
        name: The name of the program in `programs`.
        *arguments: Its arguments.
        ours: Whether `accelerate` is the interface over drivetrain.
        num_processes: The number of processes on this machine.
        options: Options of `python -m drivetrain_accelerate`.
    """
    done = program_done(name, *arguments, ours=ours, num_processes=num_processes, options=options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    (line,) = (text for text in done.stdout.splitlines() if text.startswith("FOUND "))
    return json.loads(line.removeprefix("FOUND "))


def program_done(
    name: str, *arguments: str, ours: bool, num_processes: int = 1, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, whatever its exit code; see `run_program`."""
    program = [str(PROGRAMS / f"{name}.py"), *arguments]
    through = ["-m", "drivetrain_accelerate", *options] if ours else []
    if num_processes == 1:
        command = [sys.executable, *through, *program]
    else:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
        command = [sys.executable, *launch, *through, *program]
    # One thread, as torchrun gives each process: small models are no faster on several, and wait for each other.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=170, env=environment)
