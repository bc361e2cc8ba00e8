"""The watchdog: two daemon threads per rank that detect a hang, ask every rank for its position, and report it.

The monitor checks this process only, so that the network cannot delay it; the reporter uses the rendezvous store.
Both poll several times per hang timeout: at least once a second for up to 2000 ranks, less often for more.
"""

import threading
from pathlib import Path

from torch.distributed import PrefixStore, Store

from drivetrain_config import environ
from drivetrain_state.compat import default_store
from drivetrain_state.hang.monitor import HangMonitor
from drivetrain_state.hang.progress_record import ProgressRecord
from drivetrain_state.hang.report import HANG_NOTE
from drivetrain_state.hang.reporter import HangReporter
from drivetrain_state.settings import StateSettings
from drivetrain_state.store_rounds import StoreRounds
from drivetrain_state.topology import Topology


class Watchdog:
    """A handle on the watchdog of one `ProgressRecord`, as returned by `start_watchdog`."""

    def __init__(self, monitor: HangMonitor, record: ProgressRecord) -> None:
        self._monitor = monitor
        self._record = record

    def stop(self) -> None:
        """Release the record. For the last record, also announce the departure in the store and end the threads.

        Call it before destroying the process group, whose store this process may host. A second call does nothing.
        """
        self._monitor.release(self._record)


def start_watchdog(
    topology: Topology,
    settings: StateSettings,
    record: ProgressRecord,
    *,
    store: Store | None = None,
    report_directory: Path | None = None,
) -> Watchdog:
    """Start the watchdog without waiting for other ranks; the training loop marks progress in `record`.

    Must be called on all ranks, once the process group exists, with equal timeouts. A second call in one process, for
    the same store, adds its record to the running threads: progress on any record counts, and the first call's
    settings apply. By default, `store` is the default process group's, and full stacks go to the working directory.
    """
    shared = default_store() if store is None else store
    for thread in threading.enumerate():
        if isinstance(thread, HangMonitor) and thread.adopt(record, shared):
            return Watchdog(thread, record)
    error_file = environ.read("TORCHELASTIC_ERROR_FILE")
    note = Path(error_file).with_name(HANG_NOTE) if error_file else None
    monitor = HangMonitor(topology=topology, settings=settings, record=record, store=shared, note=note)
    # A connection of its own: a main thread that waits on `shared` holds its lock.
    rounds = StoreRounds(PrefixStore("drivetrain_watchdog", shared.clone()), rank=topology.rank)
    monitor.begin(HangReporter(monitor, rounds, directory=report_directory or Path.cwd()))
    return Watchdog(monitor, record)
