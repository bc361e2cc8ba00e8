"""Launches for tests: the command as a user types it, in a folder and an environment of its own.

A launch of several processes imports torch in the launcher. `drivetrain_with_torch` and `started_with_torch` fork the
launcher off a process that has it, and so save seconds; `drivetrain` and `started` are fresh interpreters.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
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
def users_environment() -> Callable[..., dict[str, str]]:
    """Return the function that makes a user's environment with the given variables."""
    return clean_environment


@pytest.fixture
def drivetrain(tmp_path: Path) -> Launch:
    """Run `drivetrain ARGUMENTS...` in `tmp_path` to its end."""
    return partial(_run, sys.executable, tmp_path)


@pytest.fixture
def drivetrain_here(capsys: pytest.CaptureFixture[str]) -> Launch:
    """Run `drivetrain ARGUMENTS...` in this process and its working folder; it starts none of its own."""
    from drivetrain_launcher.cli.main import main

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = main(arguments)
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return run


@pytest.fixture
def drivetrain_with_torch(tmp_path: Path, python: str) -> Launch:
    """Run `drivetrain ARGUMENTS...` in `tmp_path` to its end, in processes that have imported torch."""
    return partial(_run, python, tmp_path)


def _run(
    python: str, folder: Path, *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-m", "drivetrain_launcher", *arguments],
        cwd=folder,
        env=clean_environment(**(environment or {})),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Start]:
    """Start `drivetrain ARGUMENTS...` in `tmp_path` and leave it running; its output is one pipe."""
    yield from _start(sys.executable, tmp_path, clean_environment(OMP_NUM_THREADS="1"))


@pytest.fixture
def started_with_torch(tmp_path: Path, python: str) -> Iterator[Start]:
    """Start `drivetrain ARGUMENTS...`, in a process that has imported torch; its ranks are fresh interpreters.

    They are its children, as those of a user's launcher are, and notice its end.
    """
    yield from _start(python, tmp_path, clean_environment(TEST_FRESH_RANKS="1", OMP_NUM_THREADS="1"))


def _start(python: str, folder: Path, environment: dict[str, str]) -> Iterator[Start]:
    running: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [python, "-m", "drivetrain_launcher", *arguments],
            cwd=folder,
            env=environment,
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
