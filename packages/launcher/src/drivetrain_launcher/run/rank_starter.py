"""Start a rank on its cores: as a fresh interpreter, or forked off a process that has imported its modules."""

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from subprocess import Popen
from typing import IO, Any

from drivetrain_launcher.plan.launch_plan import LaunchPlan
from drivetrain_launcher.run.preload.forked_rank import ForkedRank
from drivetrain_launcher.run.preload.preloader import Preloader


class RankStarter:
    """The way in which the ranks of a plan are started.

    Args:
        plan: The plan of the launch.
        preloader: The process that ranks are forked off; None for fresh interpreters.
        tell: The function that is told the process ids of the ranks of this attempt, after each that starts.

    Attributes:
        pids: The process ids of the ranks that were started in this attempt.
    """

    def __init__(
        self, plan: LaunchPlan, preloader: Preloader | None, tell: Callable[[Sequence[int]], None]
    ) -> None:
        self.pids: list[int] = []
        self._plan = plan
        self._preloader = preloader
        self._tell = tell

    def begin_attempt(self) -> None:
        """Forget the ranks of the attempt before."""
        self.pids = []

    def start(
        self,
        local_rank: int,
        environment: Mapping[str, str],
        outputs: Sequence[IO[Any] | None],
        start_fresh: Callable[[], "Popen[Any]"],
    ) -> "Popen[Any] | ForkedRank":
        """Start a rank; see `compat.StartRank`."""
        cpus = self._plan.bindings[local_rank].cpus if self._plan.bindings else ()
        if self._preloader is None:
            with bound_to(cpus):
                rank = start_fresh()
            self.pids.append(rank.pid)
            return rank
        rank = self._preloader.start_rank(environment, cpus=cpus, outputs=outputs)
        self.pids.append(rank.pid)
        # The keeper finds fresh ranks by their first environment; that of a forked one is its parent's.
        self._tell(self.pids)
        return rank


@contextmanager
def bound_to(cpus: Sequence[int]) -> Generator[None]:
    """Run the block on these CPUs, or on any if there are none; processes that are started inherit them."""
    if not cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
