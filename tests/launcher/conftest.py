"""Launches for tests: the command as a user types it, in a folder and an environment of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# What a shell that trains may have set, and a test must not inherit.
_INHERITED = (
    "DRIVETRAIN_",
    "PYTHONUNBUFFERED",
    "TORCHELASTIC_",
    "OMP_NUM_THREADS",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "GROUP_",
)

Launch = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]


def clean_environment(**variables: str) -> dict[str, str]:
    """The environment without what other launches left in it."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(_INHERITED)}
    return {**kept, **variables}


@pytest.fixture
def drivetrain(tmp_path: Path) -> Launch:
    """Run `drivetrain ARGUMENTS...` in `tmp_path` to its end."""

    def run(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "drivetrain_launcher", *arguments],
            cwd=tmp_path,
            env=clean_environment(**(environment or {})),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )

    return run


@pytest.fixture
def started(tmp_path: Path) -> Start:
    """Start `drivetrain ARGUMENTS...` in `tmp_path` and leave it running; its output is one pipe."""
    running: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "drivetrain_launcher", *arguments],
            cwd=tmp_path,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        running.append(process)
        return process

    # What a shell starts in the background ignores SIGINT, and so would what these tests start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield start
    signal.signal(signal.SIGINT, before)
    for process in running:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Path]:
    """Write a script into the folder where `drivetrain` runs."""

    def write(source: str, name: str = "script.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        return path

    return write
