"""The tests that need torch-xla, in the project of its own that has the torch that it wants."""

import os
import platform
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from checks.commands import shown
from checks.commits import drawn_by_commit
from checks.findings import Finding

PROJECT = "envs/xla"
TESTS = "tests/xla"
PAGE = "docs/howto/xla.md"
NUM_DEVICES = ("1", "2", "4")  # a process has one number of devices for good
_MACHINE = "x86_64"  # for which there are wheels of torch-xla
_PYTHON = (3, 14)  # below which there are
_FREE_GIB = 9  # torch with CUDA's libraries, where none of them is in uv's cache yet
_SYNC_SECONDS = 1800
# Meant to take less than five minutes on a machine that does nothing else, and ended after this.
_TIMEOUT_SECONDS = 900


def check(root: Path, *, drawn: bool = False) -> list[Finding]:
    """Install torch-xla with the torch that it wants, and run its tests on each number of XLA's devices.

    Where it cannot be installed, the check says why, and finds nothing.

    Args:
        root: The repository.
        drawn: Whether to draw one number of devices by the commit's hash.
    """
    project = root / PROJECT
    if (reason := why_not_here(sys.platform, platform.machine(), sys.version_info[:2], project)) is not None:
        print(f"xla: skipped, since {reason}", flush=True)
        return []
    sync = [os.environ.get("UV", "uv"), "sync", "--locked", "--project", str(project)]
    found = shown(PROJECT, sync, cwd=root, timeout_seconds=_SYNC_SECONDS, environment=variables(project, "1"))
    for number in () if found else drawn_by_commit(NUM_DEVICES, 1) if drawn else NUM_DEVICES:
        python = str(project / ".venv" / "bin" / "python")
        tests = [python, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-rs", TESTS, PAGE]
        print(f"xla: {number} devices", flush=True)
        found += shown(
            f"{PROJECT} with {number} devices",
            tests,
            cwd=root,
            timeout_seconds=_TIMEOUT_SECONDS,
            environment=variables(project, number),
        )
    return found


def why_not_here(system: str, machine: str, python: tuple[int, int], project: Path) -> str | None:
    """Return why torch-xla cannot be installed on this machine, or None if it can.

    Args:
        system: The operating system, as `sys.platform` names it.
        machine: The processor, as `platform.machine()` names it.
        python: Major and minor version of Python.
        project: The folder of the project that installs it.
    """
    if system != "linux" or machine != _MACHINE:
        return f"there is no torch-xla for {system} on {machine}, only for linux on {_MACHINE}"
    if python >= _PYTHON:
        return (
            f"there is no torch-xla for Python {python[0]}.{python[1]}, only below {_PYTHON[0]}.{_PYTHON[1]}"
        )
    free_gib = shutil.disk_usage(project).free / 2**30
    if not (project / ".venv").exists() and free_gib < _FREE_GIB:
        return f"its environment takes up to {_FREE_GIB} GiB, and {free_gib:.1f} GiB are free"
    return None


def variables(project: Path, num_devices: str) -> Mapping[str, str]:
    """Return the variables of the environment and of XLA's runtime.

    Args:
        project: The folder of the project.
        num_devices: How many devices XLA is to make of the processor.
    """
    return {
        # The environment beside the project, also where that of the workspace surrounds this process.
        "UV_PROJECT_ENVIRONMENT": str(project / ".venv"),
        "VIRTUAL_ENV": "",
        "PYTHONPATH": "",
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": num_devices,
        "XLA_FLAGS": "--xla_backend_optimization_level=0",  # most of the time is compiling
        # XLA writes a line on each graph that it divides: that GSPMD will be replaced.
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
