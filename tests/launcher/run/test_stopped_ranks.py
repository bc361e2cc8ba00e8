"""A rank that SIGSTOP has stopped: named at once, and ended when the others give up."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drivetrain_launcher.run.failures import RankFailure
from drivetrain_launcher.run.stopped_ranks import StoppedRanks
from launcher.run.running import read_until

Ranks = dict[int, int]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Return two running processes, as ranks 0 and 1 by process id."""
    running = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    yield {process.pid: rank for rank, process in enumerate(running)}
    for process in running:
        process.kill()
        process.wait()


def look_until(stopped: StoppedRanks, ranks: Ranks, said: list[str], count: int) -> None:
    while len(said) < count:
        stopped.look(ranks)
        time.sleep(0.05)


def stop(pid: int) -> None:
    """Stop a child, and wait until it stands still."""
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)


def failure(pid: int) -> RankFailure:
    return RankFailure(rank=1, local_rank=1, pid=pid, exit_code=-signal.SIGKILL)


def test_a_rank_that_stands_still_is_named_and_killed_at_the_limit(ranks: Ranks) -> None:
    said: list[str] = []
    stopped = StoppedRanks(said.append, limit_seconds=3.0, may_pause=True)
    first, second = ranks
    stop(second)
    look_until(stopped, ranks, said, 2)
    assert said[0].startswith(f"rank 1 stands still: a signal (SIGSTOP) has stopped its process {second}")
    seconds = re.match(r"rank 1 has stood still for (\d+) s, and is killed", said[1])
    assert seconds is not None
    assert int(seconds[1]) >= 3
    assert os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]) == -signal.SIGKILL
    assert stopped.explain(failure(second)).error.startswith("a signal (SIGSTOP) had stopped it")
    assert stopped.explain(failure(first)).error == ""


@pytest.mark.slow
def test_a_rank_that_goes_on_is_told_and_a_pause_of_all_has_no_limit(ranks: Ranks) -> None:
    said: list[str] = []
    stopped = StoppedRanks(said.append, limit_seconds=2.0, may_pause=True)
    for pid in ranks:
        stop(pid)
    look_until(stopped, ranks, said, 2)
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
    look_until(stopped, ranks, said, 4)
    assert sorted(said[2:]) == ["rank 0 goes on", "rank 1 goes on"]
    stopped.release(ranks, may_save=False)
    os.kill(next(iter(ranks)), 0)  # what runs is left to the signal that stops all


@pytest.mark.parametrize(("may_save", "ending"), [(True, signal.SIGTERM), (False, signal.SIGKILL)])
def test_ranks_that_stand_still_end_with_the_others(
    ranks: Ranks, may_save: bool, ending: signal.Signals
) -> None:
    pid = next(iter(ranks))
    stop(pid)
    StoppedRanks(print, limit_seconds=None, may_pause=True).release(ranks, may_save=may_save)
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -ending


@pytest.mark.slow
def test_the_launch_ends_once_another_rank_has_failed(
    started_with_torch: Callable, script: Callable, tmp_path: Path
) -> None:
    script(
        "import os, signal, time\n"
        "if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGSTOP)\n"
        "while not os.path.exists('told'): time.sleep(0.05)\n"
        "raise SystemExit(124)\n"
    )
    launch = started_with_torch("launch", "--cpu", "--num-processes", "2", "script.py")
    read_until(launch, "drivetrain: rank 1 stands still: a signal (SIGSTOP) has stopped its process")
    (tmp_path / "told").touch()
    output, _ = launch.communicate(timeout=100)
    assert "  rank 1: a signal (SIGSTOP) had stopped it, and the launcher killed it" in output
    assert launch.returncode == 124
