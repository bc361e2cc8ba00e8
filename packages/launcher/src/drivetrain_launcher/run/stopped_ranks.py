"""Name the ranks that a signal has stopped, and end them once the other ranks no longer wait for them."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from drivetrain_launcher.run.failures import RankFailure
from drivetrain_launcher.run.keeper.sessions import stopped_among

_LOOK_INTERVAL_SECONDS = 0.5
# Some tools stop a process for a moment to look at it.
_TOLERATED_SECONDS = 2.0


class StoppedRanks:
    """The ranks of this node that stand still.

    Args:
        say: The function that shows a line.
        limit_seconds: The time after which a stopped rank is killed: other ranks then give up waiting. None for none.
        may_pause: Whether stopping all ranks of this node is a pause, which has no limit.
    """

    def __init__(self, say: Callable[[str], None], *, limit_seconds: float | None, may_pause: bool) -> None:
        self._say = say
        self._limit_seconds = limit_seconds
        self._may_pause = may_pause
        self._since: dict[int, float] = {}
        self._told: set[int] = set()
        self._killed: set[int] = set()
        self._looked_at = 0.0

    def look(self, ranks: Mapping[int, int]) -> None:
        """Name the ranks, given by process id, that stand still, and kill them at the limit. Call this often."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_INTERVAL_SECONDS:
            return
        self._looked_at = now
        stopped = stopped_among(ranks)
        for pid in self._told - set(stopped):
            self._told.discard(pid)
            if pid in ranks:
                self._say(f"rank {ranks[pid]} goes on")
        self._since = {pid: self._since.get(pid, now) for pid in stopped}
        is_pause = self._may_pause and len(stopped) == len(ranks)
        limit_seconds = None if is_pause else self._limit_seconds
        for pid, since in self._since.items():
            rank, seconds = ranks[pid], now - since
            if seconds >= _TOLERATED_SECONDS and pid not in self._told:
                self._told.add(pid)
                self._say(
                    f"rank {rank} stands still: a signal (SIGSTOP) has stopped its process {pid}, and the other "
                    f"ranks wait for it; kill -CONT {pid} lets it go on"
                )
            if limit_seconds is not None and seconds >= limit_seconds:
                self._say(f"rank {rank} has stood still for {seconds:.0f} s, and is killed")
                self._kill(pid)

    def release(self, ranks: Mapping[int, int], *, may_save: bool) -> None:
        """End the stopped ranks, which cannot react to SIGTERM; if they may save, continue them instead."""
        for pid in stopped_among(ranks):
            if may_save:
                os.kill(pid, signal.SIGCONT)
            else:
                self._kill(pid)

    def explain(self, failure: RankFailure) -> RankFailure:
        """Return a failure, with a reason added if its rank was killed for standing still."""
        if failure.pid not in self._killed:
            return failure
        why = "a signal (SIGSTOP) had stopped it, and the launcher killed it as the other ranks gave up on it"
        return replace(failure, error=why)

    def _kill(self, pid: int) -> None:
        self._killed.add(pid)
        # A child of this process, whose id nobody else has until it is waited for.
        os.kill(pid, signal.SIGKILL)
