"""Run an example as its users do, through the `drivetrain` command."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def launch(
    example: str,
    *args: str,
    python: str = sys.executable,
    num_processes: int,
    interrupt_at: str | None = None,
    timeout_seconds: float = 150,
    launcher: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run an example to its end, or press Ctrl-C once a line of its standard error contains `interrupt_at`.

    Ctrl-C reaches all processes of a group. Those that `PreloadedPython` forks are not in it: take a plain Python.

    Interrupted, a single process gives its own exit code, and the launcher of several 130, as a shell expects.
    """
    command = [python, "-m", "drivetrain_launcher", "launch", "--num-processes", str(num_processes)]
    command += launcher  # further flags of its own
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DRIVETRAIN_")}
    with subprocess.Popen(
        [*command, str(EXAMPLES / example), *args],
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a terminal sends Ctrl-C to the whole foreground group, and so do we
    ) as process:
        assert process.stderr is not None
        read: list[str] = []
        try:
            while interrupt_at is not None and (line := process.stderr.readline()):
                read.append(line)
                if interrupt_at in line:
                    os.killpg(process.pid, signal.SIGINT)
                    break
            out, err = process.communicate(timeout=timeout_seconds)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    completed = subprocess.CompletedProcess(process.args, process.returncode, out, "".join(read) + err)
    allowed = {0} if interrupt_at is None else {128 + signal.SIGINT}
    assert completed.returncode in allowed, completed.stdout + completed.stderr
    return completed
