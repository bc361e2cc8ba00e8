"""The tests that need Transformer Engine, in the project of its own that compiles it."""

import os
import platform
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from checks.commands import shown
from checks.findings import Finding

PROJECT = "envs/te"
TESTS = "tests/precision/te"
_MACHINES = ("x86_64", "aarch64")  # for which its core is on the index
# One process, since the import takes as long as the tests; first, since the tests are skipped where it fails.
_PROGRAM = """
import sys
import pytest
from drivetrain_precision.fp8.te_library import transformer_engine
print(transformer_engine().__file__)
sys.exit(pytest.main(sys.argv[1:]))
"""
_FREE_GIB = 10  # torch and CUDA's libraries, where none of them is in uv's cache yet
_COMPILE_SECONDS = 3600


def check(root: Path) -> list[Finding]:
    """Compile Transformer Engine if it is not there yet, import it, and run its tests; a GPU is not needed.

    Where it cannot be compiled, the check says why, and finds nothing.
    """
    project = root / PROJECT
    if (reason := why_not_here(sys.platform, platform.machine(), project)) is not None:
        print(f"te: skipped, since {reason}", flush=True)
        return []
    variables = build_variables(project)
    sync = [os.environ.get("UV", "uv"), "sync", "--locked", "--project", str(project)]
    if found := shown(PROJECT, sync, cwd=root, timeout_seconds=_COMPILE_SECONDS, environment=variables):
        return found
    python = str(scripts(project) / "python")
    tests = [python, "-c", _PROGRAM, "-q", "-n", "0", "-p", "no:cacheprovider", "-rs", TESTS]
    return shown(PROJECT, tests, cwd=root, timeout_seconds=900, environment=variables)


def why_not_here(system: str, machine: str, project: Path) -> str | None:
    """Return why Transformer Engine cannot be compiled on this machine, or None if it can.

    Args:
        system: The operating system, as `sys.platform` names it.
        machine: The processor, as `platform.machine()` names it.
        project: The folder of the project that compiles it.
    """
    if system != "linux":
        return f"there is no Transformer Engine for {system}"
    if machine not in _MACHINES:
        return f"there is no Transformer Engine for {machine} processors, only for {' and '.join(_MACHINES)}"
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"it is compiled, and there is no C++ compiler {compiler!r}: apt-get install g++"
    free_gib = shutil.disk_usage(project).free / 2**30
    if not scripts(project).exists() and free_gib < _FREE_GIB:
        return f"its environment takes up to {_FREE_GIB} GiB, and {free_gib:.1f} GiB are free"
    return None


def build_variables(project: Path) -> Mapping[str, str]:
    """Return what the compilation needs on top of the variables that the project's own settings hold.

    Args:
        project: The folder of the project.
    """
    paths = os.pathsep.join([str(scripts(project)), os.environ.get("PATH", "")])
    jobs = os.environ.get(
        "MAX_JOBS", str(min(os.cpu_count() or 1, 4))
    )  # a compiler takes up to 1.5 GiB of memory
    # The environment beside the project, also where that of the workspace is elsewhere, or surrounds this process.
    own = {"UV_PROJECT_ENVIRONMENT": str(scripts(project).parent), "VIRTUAL_ENV": "", "PYTHONPATH": ""}
    return {"PATH": paths, "MAX_JOBS": jobs, **own}


def scripts(project: Path) -> Path:
    """Return the folder of the programs in the project's environment."""
    return project / ".venv" / "bin"
