"""Other tools, run as commands; what they say becomes findings."""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from checks.findings import Finding

SCRIPTS = Path(sys.executable).parent


def captured(
    command: Sequence[str], *, cwd: Path, shows_output: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and keep what it prints; its exit code is the caller's to judge.

    With `shows_output`, the terminal gets its stdout, and stderr alone is kept.
    """
    return subprocess.run(
        command,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=None if shows_output else subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


def shown(
    where: str,
    command: Sequence[str],
    *,
    cwd: Path,
    timeout_seconds: float,
    environment: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Run a long command whose output goes straight to the terminal.

    Args:
        where: What a finding names as its place.
        command: The program and its arguments.
        cwd: The folder it runs in.
        timeout_seconds: It is killed after this time.
        environment: Variables on top of this process's own.

    Returns:
        One finding if the command failed or was too slow, none otherwise.
    """
    print(f"$ {shlex.join(command)}", flush=True)
    variables = {**os.environ, **(environment or {})}
    try:
        finished = subprocess.run(
            command, cwd=cwd, env=variables, stdin=subprocess.DEVNULL, timeout=timeout_seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return [Finding(where=where, message=f"not done after {timeout_seconds:g} s: {shlex.join(command)}")]
    if finished.returncode:
        return [Finding(where=where, message=f"exit code {finished.returncode} of: {shlex.join(command)}")]
    return []


def failure(where: str, finished: subprocess.CompletedProcess[str]) -> list[Finding]:
    """A finding that carries a captured command's whole output, if it failed."""
    if not finished.returncode:
        return []
    said = ((finished.stdout or "") + finished.stderr).strip()
    return [Finding(where=where, message=f"exit code {finished.returncode}\n{said}")]
