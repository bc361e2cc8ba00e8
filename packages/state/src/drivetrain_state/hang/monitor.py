"""Track how long one process has made no progress, and end the process if it is stuck for too long."""

import atexit
import multiprocessing
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from time import monotonic

from torch.distributed import Store

from drivetrain_messages import say
from drivetrain_state.hang.progress_record import ProgressRecord
from drivetrain_state.hang.report import Verdict
from drivetrain_state.hang.stack import Frame, RankPosition, find_place, thread_frames
from drivetrain_state.settings import StateSettings
from drivetrain_state.store_rounds import store_address
from drivetrain_state.topology import Topology

HANG_EXIT_CODE = 124  # the exit code of GNU `timeout`


class IdleTimer:
    """A poller of this process's records that measures the time since the last progress of any record."""

    def __init__(self, record: ProgressRecord, *, longest_gap_seconds: float) -> None:
        self.records: tuple[ProgressRecord, ...] = (record,)
        self.latest = record
        self.num_changes = 0
        self._counts: dict[ProgressRecord, int] = {}
        self._longest_gap_seconds = longest_gap_seconds
        self._progressed_at = self._looked_at = monotonic()

    @property
    def idle_seconds(self) -> float:
        """The seconds since the last progress."""
        return monotonic() - self._progressed_at

    def look(self) -> float:
        """Check the records for progress; return for how many seconds this process or its host was stopped."""
        now = monotonic()
        gap, self._looked_at = now - self._looked_at, now
        stopped_seconds = gap if gap > self._longest_gap_seconds else 0.0
        self._progressed_at += stopped_seconds
        for record in self.records:
            count = record.count
            if count != self._counts.get(record, 0):
                self._counts[record] = count
                self.latest = record
                self.num_changes += 1
                self._progressed_at = now
        return stopped_seconds


class HangMonitor(threading.Thread):
    """A thread that measures idle time, and ends the process if it is stuck beyond the group's timeout."""

    def __init__(
        self,
        *,
        topology: Topology,
        settings: StateSettings,
        record: ProgressRecord,
        store: Store,
        note: Path | None,  # the file of the report for the launcher; None without a launcher
    ) -> None:
        super().__init__(name="drivetrain-hang-monitor", daemon=True)
        self.topology = topology
        self.settings = settings
        hang = settings.hang_timeout_seconds
        # Thousands of ranks may poll one store, which answers about ten thousand requests a second.
        self.poll_seconds = max(min(hang / 20, 1.0), topology.world_size / 2000)
        self.answer_seconds = min(max(hang / 2, 3.0), 15.0)
        self.timer = IdleTimer(record, longest_gap_seconds=max(5.0, 10 * self.poll_seconds))
        self.stopping = threading.Event()
        self.ending = "finished"
        self._verdict: Verdict | None = None
        self._note = note
        self._noted = ""
        self.heard_at = monotonic()  # when the store last answered the reporter's requests
        self._store: Store | None = store
        self._store_address = store_address(store)
        self._threads: list[threading.Thread] = [self]
        self._stack: tuple[Frame, ...] = ()
        self._stack_since = monotonic()
        self._reported_at_change = -1

    def begin(self, reporter: threading.Thread) -> None:
        """Start this thread and the reporter, the thread that uses the store."""
        self._threads.append(reporter)
        atexit.register(self._end_with_process)
        for thread in self._threads:
            thread.start()

    def adopt(self, record: ProgressRecord, store: Store) -> bool:
        """Poll another record too; return False if the record's store is another or this thread is stopping."""
        if store is not self._store or self.stopping.is_set():
            return False
        self.timer.records = (*self.timer.records, record)
        return True

    def release(self, record: ProgressRecord) -> None:
        """Stop polling a record; releasing the last one ends both threads."""
        self.timer.records = tuple(other for other in self.timer.records if other is not record)
        if not self.timer.records and not self.stopping.is_set():
            self.stopping.set()
            atexit.unregister(self._end_with_process)
            for thread in self._threads:
                thread.join(timeout=2)  # the reporter may be blocked in a store that is gone
            self._threads, self._store = [], None  # drop the references, which frees the store's port

    def run(self) -> None:
        """Poll the records until the last one is released."""
        while not self.stopping.wait(self.poll_seconds):
            self.heard_at += self.timer.look()
            idle = self.timer.idle_seconds
            if idle < self.settings.hang_timeout_seconds / 2:
                self._stack, self._verdict = (), None
                self._leave_note("")
                continue
            if (frames := thread_frames(self.timer.latest.thread_id)) != self._stack:
                self._stack, self._stack_since = frames, monotonic()
            if idle > self.settings.timeout_seconds + 2 * self.poll_seconds:
                self._end_process_if_stuck(idle)
            elif idle > self.settings.hang_timeout_seconds:
                self._report_if_alone(idle)

    def learn(self, verdict: Verdict | None) -> None:
        """Store the ranks' verdict; None clears it once the run resumes."""
        # A later verdict that is not blocked changes nothing: ranks that waited then may have failed since.
        if verdict is None or verdict.blocked or self._verdict is None:
            self._verdict = verdict
            self._leave_note(verdict.report if verdict is not None and verdict.blocked else "")

    @property
    def will_end(self) -> bool:
        """True if this process will end at the group's timeout unless it makes progress."""
        return self._verdict is not None and self._verdict.blocked

    def stuck(self, place: RankPosition) -> bool:
        """Return whether this rank waits for another, with an unchanged stack for a third of its idle time."""
        # A loop that marks no progress, and is in a collective by chance, has another stack at the next check.
        is_unchanged = bool(self._stack) and monotonic() - self._stack_since >= self.timer.idle_seconds / 3
        return place.waits_for == "ranks" and is_unchanged

    def _end_process_if_stuck(self, idle: float) -> None:
        """Write the reason to stderr, and end the process even if its main thread never returns to Python."""
        place = find_place(self._stack)
        if not self.stuck(place) and not self.will_end:
            return
        # The launcher shows the note at the end.
        found = f"\n{self._verdict.report}" if self._verdict is not None and not self._noted else ""
        text = (
            f"rank {self.topology.rank} ends its process (exit code {HANG_EXIT_CODE}): no progress for "
            f"{idle:.0f} s, and timeout_seconds={self.settings.timeout_seconds:g}. Last progress: "
            f"{self.timer.latest.label}. Now at {place.where}: {place.call or 'no call'}{found}"
        )

        def last_words() -> None:
            say(text)
            for child in multiprocessing.active_children():
                child.kill()  # a loader worker would survive, and keep this process's output open
            sys.stdout.flush()

        thread = threading.Thread(target=last_words, daemon=True)
        thread.start()
        thread.join(timeout=2)  # a stuck main thread may block it, such as by a lock on stdout
        os._exit(HANG_EXIT_CODE)

    def _report_if_alone(self, idle: float) -> None:
        """Write this rank's position to stderr, once per hang, if the store does not answer."""
        place = find_place(self._stack)
        is_reported = self._reported_at_change == self.timer.num_changes
        if is_reported or monotonic() - self.heard_at < self.answer_seconds or not self.stuck(place):
            return
        self._reported_at_change = self.timer.num_changes
        report = (
            f"rank {self.topology.rank}: no progress for {idle:.0f} s (last: "
            f"{self.timer.latest.label}), at {place.where}: {place.call}\n"
            f"Likely culprit: whoever hosts the rendezvous store at {self._store_address} (rank 0, or the "
            "launcher): it does not answer, so it was killed or stopped"
        )
        say(report)
        self._leave_note(report)

    def _leave_note(self, report: str) -> None:
        """Write the note that the launcher shows if the run ends now; an empty report removes it."""
        if self._note is None or report == self._noted:
            return
        with suppress(OSError):  # the launcher has died, and its folder is gone
            if report:
                self._note.write_text(report)
            else:
                self._note.unlink()
            self._noted = report

    def _end_with_process(self) -> None:
        error = getattr(sys, "last_value", None)
        if error is not None:
            self.ending = f"ended by {type(error).__name__}: {' '.join(str(error).split())[:80]}"
        for record in self.timer.records:
            self.release(record)
