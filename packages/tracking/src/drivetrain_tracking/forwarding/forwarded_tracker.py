"""A tracker by its name, fed from the log by a writer process beside the training."""

import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drivetrain_tracking.errors import TrackerStateError, ValueNotLoggableError
from drivetrain_tracking.forwarding.writer_main import options_path
from drivetrain_tracking.forwarding.writer_process import WriterCommand, WriterProcess
from drivetrain_tracking.platforms.platform import Platform
from drivetrain_tracking.protocol import Metrics, PlatformTracker, Tracker
from drivetrain_tracking.registry import make_tracker
from drivetrain_tracking.settings import TrackingSettings
from drivetrain_tracking.values.plain import are_plain, plain_config
from drivetrain_tracking.values.records import LoggedRecord, MediaKind

logger = logging.getLogger(__name__)


class DrainTime:
    """The time at the end of a run in which all platforms together may take the rest of the log."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._until: float | None = None

    def restart(self) -> None:
        """Reset the time; the next call of `left` starts it again."""
        self._until = None

    def left(self) -> float:
        """Return the seconds that are left, at least 0."""
        if self._until is None:
            self._until = time.monotonic() + self.seconds
        return max(0.0, self._until - time.monotonic())


class ForwardedTracker:
    """A tracker whose platform cannot slow, stop or crash the process that logs.

    `log` sends nothing: a `JSONLTracker` of the same folder, started before and finished before this one, writes the
    log that the writer process follows.

    Args:
        log: The path of the log.
        drain_time: The time at the end for the rest of the log, shared by a run's platforms; 30 s if None.

    Attributes:
        platform: A tracker like the writer process's, never started; it tells options and names.

    Raises:
        UnknownTrackerError: There is no tracker of this name.
        MissingLibraryError: The platform's library is not installed.
    """

    on_all_ranks = False

    def __init__(self, name: str, log: Path, *, drain_time: DrainTime | None = None) -> None:
        self.platform: Tracker = make_tracker(name, log.parent)
        self.name = self.platform.name
        self._made_by = name
        self._known_names: set[str] = set()
        self._log = log
        self.drain_time = drain_time or DrainTime(TrackingSettings().drain_seconds)
        self._writer: WriterProcess | None = None

    def start(self, run_name: str, config: Metrics, **options: Any) -> None:  # noqa: ARG002 the log tells it
        """Start the writer process, which takes the run's name and configuration from the log.

        Raises:
            TrackerStateError: The tracker is started already.
            ValueNotLoggableError: An option is not a plain value, so that no other process can receive it.
        """
        if self._writer is not None:
            raise TrackerStateError(f"{self.name}: start() again, while a run is open: finish() first")
        try:
            told = json.dumps(options)
        except (TypeError, ValueError) as error:
            raise ValueNotLoggableError(
                f"options of the tracker {self.name!r}: {error}; it is started in a process of its own, so that its "
                "options are plain values. Pass the platform's own object in log_with to start it in this process"
            ) from None
        options_path(self._log, self.name).write_text(told)
        command = WriterCommand(
            log=self._log,
            tracker=self._made_by,
            platform=self.name,
            seconds_after_end=self.drain_time.seconds,
            left_out=getattr(self.platform, "joining_variables", ()),
            import_path=[path for path in sys.path if path] if ":" in self._made_by else (),
        )
        self.drain_time.restart()
        self._writer = WriterProcess(command)
        # A platform warns of names that it changes; here, in the training, the user reads it.
        if isinstance(self.platform, Platform):
            self.platform.parameters(plain_config(config))

    @property
    def media_kinds(self) -> frozenset[MediaKind]:
        """The kinds of media that the platform takes."""
        return self.platform.media_kinds if isinstance(self.platform, PlatformTracker) else frozenset()

    def log(self, values: Metrics, *, step: int | None = None) -> None:
        """Do what `write` does."""
        self.write([LoggedRecord(time=0.0, step=step, values=values)])

    def write(self, records: Sequence[LoggedRecord]) -> None:
        """Report names that the platform does not take; the writer process reads the values from the log."""
        for record in records:
            known = self._known_names
            if record.media or not (known.issuperset(record.values) and are_plain(record.values)):
                if isinstance(self.platform, Platform):
                    self.platform.named([record])
                known.update(record.values)

    def count_held(self, records: Sequence[LoggedRecord]) -> int:
        """Return the number of records: the log holds all, and the writer process asks the platform."""
        return len(records)

    def finish(self) -> None:
        """Wait within the drain time for the platform to take the rest of the log; report if it does not."""
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        if not writer.finish(self.drain_time.left()):
            logger.warning(
                "tracker %r did not take everything within %g s; nothing is lost: drivetrain track replay %s --to %s "
                "sends the rest",
                self.name,
                self.drain_time.seconds,
                self._log.parent,
                self._made_by,
            )
