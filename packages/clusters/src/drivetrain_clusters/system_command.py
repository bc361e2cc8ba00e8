"""Run a cluster's command, as words that no shell reads."""

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from drivetrain_clusters.errors import ClusterError
from drivetrain_messages import say

Answer = TypeVar("Answer")

_SECONDS = 120.0
_PATIENCE_SECONDS = 60.0
_ASK_SECONDS = 2.0


def run_command(*words: str, folder: Path | None = None, hints: Mapping[str, str] | None = None) -> str:
    """Run a command for at most two minutes and return its output; a ClusterError holds its message and a hint."""
    import subprocess  # takes tens of milliseconds, which a launcher that only looks for a cluster saves

    try:
        done = subprocess.run(
            words,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except FileNotFoundError as error:
        if folder is not None and not folder.is_dir():
            raise ClusterError(f"{folder}: no such folder, in which {words[0]} should run") from None
        raise ClusterError(
            f"{words[0]}: the command is not installed here, or not on PATH; run this on a machine of the cluster"
        ) from error
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{words[0]}: the command did not answer within {_SECONDS:g} s") from None
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        said = said.replace(f"{words[0]}: error: ", "")
        raise ClusterError(f"{words[0]} failed: {said}{hint_for(said, hints or {})}")
    return done.stdout


def patiently(question: Callable[[], Answer]) -> Answer:
    """Ask a cluster; if it cannot answer, as while its server restarts, repeat the question for a minute."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    try:
        return question()
    except ClusterError as error:
        say(f"{error}; asking again for {_PATIENCE_SECONDS:g} s")
    while True:
        time.sleep(_ASK_SECONDS)
        try:
            return question()
        except ClusterError:
            if time.monotonic() > deadline:
                raise


def in_this_python(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command with the `drivetrain` of this Python, which need not be on the PATH."""
    if command[0] == "drivetrain":
        return (sys.executable, "-m", "drivetrain_launcher", *command[1:])
    return command


def hint_for(message: str, hints: Mapping[str, str]) -> str:
    """Return "; " and the hint whose key, in lower case, is a part of a program's message; empty if no hint fits."""
    return next((f"; {hint}" for part, hint in hints.items() if part in message.lower()), "")
