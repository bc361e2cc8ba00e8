"""The watchdog: two daemon threads of each rank that notice a hang, ask every rank where it is, and say who it is.

The guard looks at this process alone, so that it keeps time whatever the network does; the talker goes through the
rendezvous store. Both look a few times in each hang timeout, once a second at most.
"""

import threading
from pathlib import Path

from torch.distributed import Store
from torch.distributed.distributed_c10d import _get_default_store  # pyright: ignore[reportPrivateUsage]

from drivetrain_state.hang.guard import Guard
from drivetrain_state.hang.progress_record import Watch
from drivetrain_state.hang.rounds import HangRounds
from drivetrain_state.hang.store_talk import Talker
from drivetrain_state.settings import StateSettings
from drivetrain_state.topology import Topology


class Watchdog:
    """A watched `Watch`; `stop` ends it. Made by `start_watchdog`."""

    def __init__(self, guard: Guard, watch: Watch) -> None:
        self._guard = guard
        self._watch = watch

    def stop(self) -> None:
        """Say goodbye in the store and end the threads; stopping twice is fine.

        Called before the process group is destroyed, since the group's store may be hosted here.
        """
        self._guard.release(self._watch)


def start_watchdog(
    *,
    topology: Topology,
    settings: StateSettings,
    watch: Watch,
    store: Store | None = None,
    report_directory: Path | None = None,
) -> Watchdog:
    """Watch for hangs. Called on all ranks, once the process group exists; waits for none of them.

    A second call in one process, for the same store, adds its watch to the threads that run already: progress on
    either is progress, and the first call's settings hold.

    Args:
        topology: Which rank this is, of how many.
        settings: `hang_timeout_seconds` and `timeout_seconds`, the same on all ranks.
        watch: What the training loop marks.
        store: The store that all ranks share; the default process group's if not said.
        report_directory: Where the full stacks are written; the working directory if not said.
    """
    shared = _get_default_store() if store is None else store
    for thread in threading.enumerate():
        if isinstance(thread, Guard) and thread.adopt(watch, shared):
            return Watchdog(thread, watch)
    guard = Guard(topology=topology, settings=settings, watch=watch, store=shared)
    rounds = HangRounds(shared, rank=topology.rank)
    talker = Talker(guard, rounds, directory=report_directory or Path.cwd())
    guard.begin(talker)
    return Watchdog(guard, watch)
