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
    """

    def __init__(self, plan: LaunchPlan, preloader: Preloader | None) -> None:
        self._plan = plan
        self._preloader = preloader

    def start(
        self,
        local_rank: int,
        environment: Mapping[str, str],
        outputs: Sequence[IO[Any] | None],
        start_fresh: Callable[[], "Popen[Any]"],
    ) -> "Popen[Any] | ForkedRank":
        """Start a rank; see `compat.StartRank`."""
        cpus = self._plan.bindings[local_rank].cpus if self._plan.bindings else ()
        if self._preloader is not None:
            return self._preloader.start_rank(environment, cpus=cpus, outputs=outputs)
        with bound_to(cpus):
            return start_fresh()


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
