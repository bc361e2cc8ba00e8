"""Deliver a log to a tracker in order: retry while a platform is down, and continue after a kill."""

import logging
import os
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from drivetrain_tracking.errors import DeliveryInUseError, ValueNotLoggableError
from drivetrain_tracking.forwarding.delivery import Delivery, delivery_path
from drivetrain_tracking.media.media_store import read_medium
from drivetrain_tracking.protocol import InfoTracker, PlanTracker, PlatformTracker, StateTracker, Tracker
from drivetrain_tracking.run.run_state import RunState
from drivetrain_tracking.spool.files import is_locked, open_alone
from drivetrain_tracking.spool.line import RESERVED_NAMES, restore_numbers
from drivetrain_tracking.spool.spool_reader import SpooledRecord, SpoolReader
from drivetrain_tracking.values.records import LoggedRecord, MediaKind, StoredMedium

logger = logging.getLogger(__name__)

_BATCH = 256  # records that a platform gets at once
_LAST_LINE_BYTES = 4096  # enough for the line of a run's end
_MOST_FAILURES = 4  # of a record by itself, before the platform is tried with another


class Forwarder:
    """The delivery of one log to one tracker. Not thread-safe.

    A file beside the log keeps the state of the delivery, and notes each batch before it is sent. After a kill or a
    failed call, a `PlatformTracker` says how many records of that batch the platform holds. Any other tracker gets
    single records, and after a kill gets the last record a second time.

    A record that the tracker refuses by a `ValueNotLoggableError` is counted and passed over. Any other error is
    raised: the platform may be back at the next call. No record may block all later ones: a record that fails by
    itself several times is sent without its media. If the platform also refuses this record but takes the next, the
    record is counted as refused.

    Args:
        tracker: A tracker that is not started yet.
    """

    def __init__(self, log: Path, tracker: Tracker, *, options: Mapping[str, Any] | None = None) -> None:
        self.place = delivery_path(log, tracker.name)
        self._lock = open_alone(
            self.place.with_suffix(".lock"),
            taken=DeliveryInUseError(
                f"{log.parent}: another process sends this log to {self.place.stem!r}: wait until it has ended, or "
                "end it"
            ),
        )
        self.delivery = Delivery.load(self.place)
        self._log = log
        self._reader = SpoolReader(log, self.delivery.offset)
        self._tracker = tracker
        # Looked at once: a check of a protocol takes long.
        self._platform = tracker if isinstance(tracker, PlatformTracker) else None
        self._options = options or {}
        self._waiting: list[SpooledRecord] = []
        self._is_started = False
        self._doubtful_end = self.delivery.sending_end  # up to here the platform may hold records
        self._singly_end = 0  # up to here records go one by one
        self._records = self._reader.read()
        self._num_failures = 0  # of the first waiting record, sent by itself

    @property
    def num_damaged(self) -> int:
        """The number of damaged lines that were passed over."""
        return self._reader.num_damaged

    @property
    def num_waiting(self) -> int:
        """The number of records in memory, read and not delivered yet."""
        return len(self._waiting)

    def deliver(self, *, on_progress: Callable[[Delivery], None] = lambda _: None) -> bool:
        """Deliver the log's present records; return whether the last record tells the end of the run."""
        has_ended = False
        while self._waiting or self._read():
            has_ended = self._waiting[0].record.get("event") == "finish"
            if "event" in self._waiting[0].record:
                self._deliver_event(self._waiting[0])
            else:
                goes_singly = self._platform is None or self._waiting[0].end <= self._singly_end
                waiting = self._waiting[: 1 if goes_singly else _BATCH]
                self._deliver_batch(list(takewhile(lambda found: "event" not in found.record, waiting)))
            on_progress(self.delivery)
        return has_ended

    def log_has_ended(self) -> bool:
        """Return whether the last line of the log now tells the end of the run, delivered or not."""
        tail = SpoolReader(self._log, max(self.delivery.offset, self._log.stat().st_size - _LAST_LINE_BYTES))
        last = deque(tail.read(), maxlen=1)
        return bool(last) and last[0].record.get("event") == "finish"

    def end_killed(self) -> None:
        """End the platform's run as killed, if the log lacks the run's end and no process writes the log any more."""
        has_open_run = self.delivery.run_offset >= 0 and not self.delivery.is_ended
        if not has_open_run or self.log_has_ended() or is_locked(self._log):
            return
        if isinstance(self._tracker, StateTracker):
            self._ensure_started()
        self._end("killed")
        self.delivery = replace(self.delivery, is_ended=True)
        self.delivery.save(self.place)

    def close(self) -> None:
        """Release the platform's run if it is open, so that it may go on, and let other processes deliver."""
        try:
            self._end(None)
        finally:
            os.close(self._lock)

    def _end(self, state: RunState | None) -> None:
        if not self._is_started:
            return
        self._is_started = False
        if isinstance(self._tracker, StateTracker):
            self._tracker.end(state)
        else:
            self._tracker.finish()

    def _read(self) -> bool:
        """Read at most a batch, so that a long log is never in memory; return whether records are waiting."""
        before = len(self._waiting)
        self._waiting += islice(self._records, _BATCH)
        if len(self._waiting) == before:  # the end, as it was when the file was opened
            self._records = self._reader.read()
            self._waiting += islice(self._records, _BATCH)
        return bool(self._waiting)

    def _deliver_batch(self, batch: Sequence[SpooledRecord]) -> None:
        records = [logged_record(found.record, self._log.parent) for found in batch]
        self._ensure_started()
        if self._platform is not None and batch[0].end <= self._doubtful_end:
            held = self._platform.count_held(records)
            self._advance(batch[:held])
            batch, records = batch[held:], records[held:]
        if not batch:
            return
        self._doubtful_end = max(self._doubtful_end, batch[-1].end)
        if self._platform is not None:  # other trackers cannot say what they hold
            self._save(sending_end=self._doubtful_end)
        try:
            self._send(records)
        except ValueNotLoggableError as error:
            if len(batch) > 1:
                self._singly_end = batch[-1].end  # sent one by one, the record at fault shows
            else:
                self._refuse(batch[0], error)
        except Exception as error:
            self._singly_end = max(self._singly_end, batch[-1].end)
            if len(batch) > 1 or not self._pass_over(batch[0], records[0], error):
                raise
        else:
            self._advance(batch)

    def _pass_over(self, found: SpooledRecord, failed: LoggedRecord, error: Exception) -> bool:
        """Skip a record that failed often, if the platform takes it without media, or takes the next record."""
        self._num_failures += 1
        if self._num_failures < _MOST_FAILURES:
            return False
        if failed.media and failed.values and self._takes(replace(failed, media={})):
            self._refuse(found, error)
            return True
        if len(self._waiting) < _BATCH:
            self._read()
        # The first record of values behind, in the same run; a plan and info may stand between.
        behind = takewhile(lambda one: one.record.get("event") not in ("start", "finish"), self._waiting[1:])
        after = next((one for one in behind if "event" not in one.record), None)
        if after is None:
            return False
        self._doubtful_end = max(self._doubtful_end, after.end)
        self._singly_end = max(self._singly_end, after.end)
        self._save(sending_end=self._doubtful_end)
        if not self._takes(logged_record(after.record, self._log.parent)):
            return False
        self._refuse(found, error)
        if self._waiting[0] is after:  # else a platform is asked later what it holds
            self._advance([after])
        return True

    def _takes(self, record: LoggedRecord) -> bool:
        try:
            self._send([record])
        except Exception as error:  # noqa: BLE001 - the caller raises that of the record that failed first
            logger.info("tracker %r does not take step %s either: %s", self._tracker.name, record.step, error)
            return False
        return True

    def _refuse(self, found: SpooledRecord, error: Exception) -> None:
        record = found.record
        names = [name for name in (*record, *record.get("media", {})) if name not in RESERVED_NAMES]
        logger.warning(
            "tracker %r does not take %s of step %s, which stay in the log: %s: %s",
            self._tracker.name,
            ", ".join(map(repr, names)),
            record.get("step"),
            type(error).__name__,
            error,
        )
        self._advance([found], num_refused=1)

    def _send(self, records: Sequence[LoggedRecord]) -> None:
        if self._platform is not None:
            kinds = self._platform.media_kinds
            self._platform.write([self._select_media(kinds, record) for record in records])
            return
        for record in records:
            self._tracker.log(record.values, step=record.step)

    def _select_media(self, kinds: Collection[MediaKind], record: LoggedRecord) -> LoggedRecord:
        """Return the record with only the media that the platform takes and whose files exist."""
        taken: dict[str, StoredMedium] = {}
        for name, medium in record.media.items():
            if medium.kind not in kinds:
                own = self._tracker.name
                logger.info("tracker %r has no %s: %r is beside the log only", own, medium.kind, name)
            elif medium.path is not None and not medium.path.is_file():
                logger.warning("%s is gone: %r of step %s is left out", medium.path, name, record.step)
            else:
                taken[name] = medium
        return replace(record, media=taken)

    def _deliver_event(self, found: SpooledRecord) -> None:
        record, event = found.record, found.record["event"]
        if event == "start":
            self._restart(record)
            self._advance([found], run_offset=self.delivery.offset)
            return
        if event in ("plan", "info"):
            self._ensure_started()
            try:
                if event == "plan" and isinstance(self._tracker, PlanTracker):
                    self._tracker.record_plan(restore_numbers(record["plan"]))
                if event == "info" and isinstance(self._tracker, InfoTracker):
                    self._tracker.record_info(restore_numbers(record["info"]))
            except Exception as error:
                if not self._pass_over(found, LoggedRecord(time=0.0), error):
                    raise
                return
        elif event == "finish":
            if isinstance(self._tracker, StateTracker):
                self._ensure_started()  # an earlier process was killed, or gave up, before it could say the end
            self._end(record.get("state", "finished"))
        self._advance([found], is_ended=event == "finish")

    def _restart(self, record: Mapping[str, Any]) -> None:
        self._end("killed")  # a run that goes on was started again before it said its end
        self._tracker.start(record["run"], restore_numbers(record["config"]), **self._options)
        self._is_started = True

    def _ensure_started(self) -> None:
        """Start the tracker, if need be, with the run that a killed process was delivering."""
        if self._is_started:
            return
        if self.delivery.run_offset < 0:
            self._restart({"run": self._log.parent.name, "config": {}})  # the line of its start is damaged
            return
        started = SpoolReader(self._log, self.delivery.run_offset).read()
        self._restart(next(found.record for found in started if found.record.get("event") == "start"))

    def _advance(
        self,
        batch: Sequence[SpooledRecord],
        *,
        num_refused: int = 0,
        run_offset: int | None = None,
        is_ended: bool = False,
    ) -> None:
        if not batch:
            return
        before = self.delivery
        self.delivery = replace(
            before,
            offset=batch[-1].end,
            run_offset=before.run_offset if run_offset is None else run_offset,
            num_delivered=before.num_delivered + len(batch) - num_refused,
            num_refused=before.num_refused + num_refused,
            is_ended=is_ended,
        )
        del self._waiting[: len(batch)]
        self._num_failures = 0
        self._save(sending_end=max(self.delivery.offset, self._doubtful_end))

    def _save(self, *, sending_end: int) -> None:
        self.delivery = replace(self.delivery, sending_end=sending_end)
        self.delivery.save(self.place)


def logged_record(line: Mapping[str, Any], folder: Path) -> LoggedRecord:
    """Return the record of a line of values; paths of media in a line are relative to the log's folder."""
    values = {name: value for name, value in line.items() if name not in RESERVED_NAMES}
    return LoggedRecord(
        time=line["time"],
        step=line.get("step"),
        attempt=line.get("attempt", 1),
        values=restore_numbers(values),
        media={name: read_medium(entry, folder) for name, entry in line.get("media", {}).items()},
    )
