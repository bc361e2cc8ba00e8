"""Wait for processes and what they say, and for conditions, for minutes at most."""

import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path


def wait_until(holds: Callable[[], object]) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + 150
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def wait_for_end(pids: Iterable[int]) -> None:
    """Wait until none of these processes, of which there must be one, is left."""
    left = list(pids)
    assert left
    wait_until(lambda: not any(map(is_running, left)))


def read_until(process: subprocess.Popen[str], words: str, *, count: int = 1) -> str:
    """Read lines until so many contain words, and return the last."""
    assert process.stdout is not None
    seen: list[str] = []
    for line in iter(process.stdout.readline, ""):
        seen.append(line)
        if words in line:
            count -= 1
            if not count:
                return line
    raise AssertionError(f"no {words!r} in {seen}")
