"""Launches for tests: the command as a user types it, in a folder and an environment of its own.

A launch of several processes imports torch in the launcher. `drivetrain_with_torch` and `started_with_torch` fork
that launcher off the template instead, and so save seconds; `drivetrain` and `started` are fresh interpreters.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import drivetrain_launcher
from processes import Completed, environment_alone, run_processes, without_libraries
from template import Order, Template

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

_COMMAND = Path(drivetrain_launcher.__file__).with_name("__main__.py")


class Running:
    """A `drivetrain` command that is forked off the template and runs; its output is one pipe."""

    def __init__(self, template: Template, pipe: Path, *arguments: str) -> None:
        os.mkfifo(pipe)
        order = Order(
            script=_COMMAND, arguments=arguments, environment=environment_alone(), stdout=pipe, stderr=pipe
        )
        self._running = template.start([order])
        self.pid = self._running.pids[0]
        self.stdout = pipe.open()  # as soon as the command has opened it

    def rest_of_output(self) -> str:
        """Read the output until the last process that holds it has ended."""
        return without_libraries(self.stdout.read())

    def send_signal(self, number: signal.Signals) -> None:
        """Send the command a signal."""
        os.kill(self.pid, number)

    def wait(self, timeout_seconds: float) -> int:
        """Wait for the command's end; returns its exit code."""
        codes, late = self._running.wait(time.monotonic() + timeout_seconds)
        assert not late, f"the command still ran after {timeout_seconds} s and was killed"
        return codes[0]

    def close(self) -> None:
        """Kill the command if it still runs."""
        self._running.close()
        self.stdout.close()


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
def drivetrain_with_torch(
    tmp_path: Path, template: Template, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Completed]:
    """Run `drivetrain ARGUMENTS...` in `tmp_path` to its end, in a process that has imported torch."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, environment: dict[str, str] | None = None) -> Completed:
        environments = [{**environment_alone(), **(environment or {})}]
        return run_processes(
            _COMMAND, *arguments, environments=environments, timeout_seconds=150, template=template
        )[0]

    return run


@pytest.fixture
def started_with_torch(
    tmp_path: Path, template: Template, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Running]]:
    """Start `drivetrain ARGUMENTS...` in `tmp_path`, in a process that has imported torch, and leave it running."""
    monkeypatch.chdir(tmp_path)
    running: list[Running] = []

    def start(*arguments: str) -> Running:
        running.append(Running(template, tmp_path / f"output{len(running)}", *arguments))
        return running[-1]

    yield start
    for each in running:
        each.close()


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
