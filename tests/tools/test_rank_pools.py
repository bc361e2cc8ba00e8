"""Ranks of a pool that has nothing to do."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from processes import TESTS, RankPool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere idle ranks go on")

LEFT = """
import os, sys
sys.path[:0] = sys.argv[2:]
from processes import RankPool
from test_rank_pools import own_pid
pool = RankPool(2, pythons=(sys.argv[1],))
print(*pool.call(own_pid, timeout_seconds=60), flush=True)
pool.rest()
os._exit(1)  # as where a test takes too long
"""


def own_pid() -> int:
    return os.getpid()


def await_states(pids: list[int], states: tuple[str, ...]) -> None:
    deadline = time.monotonic() + 60
    while not {state_of(pid) for pid in pids} <= set(states):
        assert time.monotonic() < deadline, [state_of(pid) for pid in pids]
        time.sleep(0.02)


def state_of(pid: int) -> str:
    """Return the letter of /proc: T for a process that is stopped, Z or none for one that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_ranks_at_rest_are_stopped_and_answer_the_next_call(
    run_ranks: Callable[..., list[int]], all_rank_pools: dict[int, RankPool]
) -> None:
    run_ranks(own_pid)
    all_rank_pools[2].close()  # what held many groups would be ended
    pids = run_ranks(own_pid)
    all_rank_pools[2].rest()
    await_states(pids, ("T",))
    assert run_ranks(own_pid) == pids


def test_ranks_at_rest_end_with_the_process_that_started_them(python: str) -> None:
    folders = [str(TESTS), str(Path(__file__).parent)]
    done = subprocess.run(
        [python, "-c", LEFT, python, *folders], capture_output=True, text=True, timeout=100, check=False
    )
    await_states([int(word) for word in done.stdout.split()], ("", "Z"))
    assert len(done.stdout.split()) == 2, done.stderr
