"""Run drivetrain's counterparts of Accelerate's commands: in this process, or in one of their own."""

import subprocess
import sys
from collections.abc import Callable, Sequence

from drivetrain_launcher.cli.main import main as run_drivetrain


def main() -> None:
    """Run `accelerate COMMAND ...` as this process's command line says it."""
    run_words(sys.argv[1:])


def run_words(words: Sequence[str]) -> None:
    """Run a command in this process; raise SystemExit with its exit code if it fails."""
    if code := run_drivetrain(["accelerate", *words]):
        raise SystemExit(code)


def program_of(command: str) -> Callable[[], None]:
    """Return the `main` of a command's module, which runs it as this process's command line says it."""
    return lambda: run_words([command, *sys.argv[1:]])


def words_of_process(words: Sequence[str]) -> list[str]:
    """Return the command line of a process that runs a command."""
    return [sys.executable, "-m", "drivetrain_launcher", "accelerate", *words]


def run_apart(words: Sequence[str], *, is_quiet: bool = False) -> None:
    """Run a command in a process of its own, since it may replace what this one has imported.

    If it fails, raise CalledProcessError, or quietly SystemExit.
    """
    command = words_of_process(words)
    done = subprocess.run(command, check=False)
    if done.returncode and is_quiet:
        raise SystemExit(done.returncode)
    done.check_returncode()
