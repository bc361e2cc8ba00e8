"""The watchdog: two daemon threads per rank that detect a hang, ask every rank for its position, and report it.

The guard checks this process only, so that the network cannot delay it; the talker uses the rendezvous store. Both
poll several times per hang timeout: at least once a second for up to 2000 ranks, less often for more.
"""

import threading
from pathlib import Path

from torch.distributed import Store
from torch.distributed.distributed_c10d import _get_default_store  # pyright: ignore[reportPrivateUsage]

from drivetrain_state.hang.guard import Guard
from drivetrain_state.hang.progress_record import ProgressRecord
from drivetrain_state.hang.rounds import HangRounds
from drivetrain_state.hang.store_talk import Talker
from drivetrain_state.settings import StateSettings
from drivetrain_state.topology import Topology


class Watchdog:
    """A handle on the watchdog of one `ProgressRecord`, as returned by `start_watchdog`."""

    def __init__(self, guard: Guard, watch: ProgressRecord) -> None:
        self._guard = guard
        self._watch = watch

    def stop(self) -> None:
        """Release the watch; with the last one, announce the departure in the store and end the threads.

        Call it before destroying the process group, whose store this process may host. A second call does nothing.
        """
        self._guard.release(self._watch)


def start_watchdog(
    *,
    topology: Topology,
    settings: StateSettings,
    watch: ProgressRecord,
    store: Store | None = None,
    report_directory: Path | None = None,
) -> Watchdog:
    """Start to watch for hangs, without waiting for other ranks.

    Must be called on all ranks, once the process group exists. A second call in one process, for the same store,
    adds its watch to the running threads: progress on either watch counts, and the first call's settings apply.

    Args:
        topology: The rank of this process and the world size.
        settings: The settings, with the same `hang_timeout_seconds` and `timeout_seconds` on all ranks.
        watch: The progress mark that the training loop sets.
        store: The store that all ranks share; by default that of the default process group.
        report_directory: The folder for the full stacks; by default the working directory.
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
