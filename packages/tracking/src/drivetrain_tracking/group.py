"""A group of trackers: converts each value once, selects the ranks that log, and reports failures by tracker."""

# The order of one call: names and options are checked, media are stored beside the log, numbers on a device begin
# their way to the host; and when they are there, a step later, each tracker gets the record.

import logging
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from drivetrain_tracking.arguments import check_options, check_tracker
from drivetrain_tracking.errors import TrackerFailedError, TrackerStateError, UnknownTrackerError
from drivetrain_tracking.jsonl import JSONLTracker, check_names
from drivetrain_tracking.media.media_store import DiskError, split_media, store_media
from drivetrain_tracking.media.medium import Medium
from drivetrain_tracking.protocol import (
    InfoTracker,
    Metrics,
    PlanTracker,
    PlatformTracker,
    StateTracker,
    Tracker,
)
from drivetrain_tracking.run.run_state import EndAtExit, RunState, in_forked_children
from drivetrain_tracking.settings import TrackingSettings
from drivetrain_tracking.spool.steps import StepOrder, checked_step
from drivetrain_tracking.values.device_values import DeviceValues, copy_values
from drivetrain_tracking.values.plain import Plain, plain_config
from drivetrain_tracking.values.records import LoggedRecord, StoredMedium

logger = logging.getLogger(__name__)

# A tracker's name -> additional keyword arguments for its calls.
TrackerOptions: TypeAlias = Mapping[str, Mapping[str, Any]]


# A record, whose numbers may still be on their way from a device, and the options of its `log` call.
_Logged: TypeAlias = tuple[LoggedRecord, TrackerOptions]


class TrackerGroup:
    """A group of trackers, used like one tracker. Called on all ranks: each tracker logs only on the ranks it needs.

    Any thread may log: calls run one after the other.

    Args:
        trackers: The trackers, each with a unique name.
        is_main: Whether this is rank 0; other ranks start and log only to trackers with `on_all_ranks`.
        settings: The `tracking` section; the defaults if None.

    Raises:
        TypeError: An object is not a tracker; the message says what it lacks.
        ValueError: Two trackers have the same name.
    """

    def __init__(
        self, trackers: Sequence[Tracker], *, is_main: bool = True, settings: TrackingSettings | None = None
    ) -> None:
        for tracker in trackers:
            check_tracker(tracker)
        names = [tracker.name for tracker in trackers]
        for name in names:
            if (count := names.count(name)) > 1:
                raise ValueError(f"trackers={names}: {name!r} is there {count} times; name each once")
        self._by_name = dict(zip(names, trackers, strict=True))
        self._used = tuple(tracker for tracker in trackers if is_main or tracker.on_all_ranks)
        # Looked at once: a check of a protocol takes as long as the whole rest of a call.
        self._platforms = {tracker.name for tracker in self._used if isinstance(tracker, PlatformTracker)}
        self._log = next((tracker for tracker in self._used if isinstance(tracker, JSONLTracker)), None)
        self._settings = settings or TrackingSettings()
        self._is_started = False
        self._is_main = is_main
        self._at_exit: EndAtExit | None = None  # from start to finish
        self._left_out: set[str] = set()  # names in options that match no tracker, warned about once each
        self._numbers: DeviceValues[_Logged] = DeviceValues()
        self._own_steps = StepOrder()
        self._renew_lock()
        in_forked_children(self, TrackerGroup._renew_lock)
        self._temporary: tempfile.TemporaryDirectory[str] | None = None  # of media, where there is no log

    @property
    def used(self) -> tuple[Tracker, ...]:
        """The trackers that this rank logs to."""
        return self._used

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all trackers, including those that this rank does not log to."""
        return tuple(self._by_name)

    @property
    def is_started(self) -> bool:
        """True between `start` and `finish`."""
        return self._is_started

    def get(self, name: str) -> Tracker:
        """Return a tracker by its name, for platform-specific calls.

        Raises:
            UnknownTrackerError: The tracker is not in use; the message lists the trackers in use.
        """
        if name not in self._by_name:
            used = self._describe_used()
            raise UnknownTrackerError(f"tracker {name!r} is {used}: add it where trackers are chosen")
        return self._by_name[name]

    def start(
        self,
        run_name: str,
        config: Any = None,
        *,
        plan: Metrics | None = None,
        info: Metrics | None = None,
        options: TrackerOptions | None = None,
    ) -> None:
        """Start every tracker.

        Args:
            run_name: The name of the run.
            config: The configuration of the run, for `plain_config`.
            plan: The run's effective plan, for trackers that keep a plan (`PlanTracker`).
            info: The run's surroundings, for trackers that keep them (`InfoTracker`).
            options: A mapping from a tracker's name to additional keyword arguments for its `start`. Options of a
                tracker that is not in use are ignored, with a warning.

        Raises:
            TypeError: A tracker's `start` does not take an option.
            TrackerStateError: The trackers are already started.
            ValueNotLoggableError: `config` or `plan` holds a value that is not plain.
            TrackerFailedError: A tracker raised an exception; the message names it.
        """
        if self._is_started:
            raise TrackerStateError("start() again: the trackers are started already; finish() them first")
        plain = plain_config({} if config is None else config, tells=self._is_main)
        plain_plan = None if plan is None else plain_config(plan)
        plain_info = None if info is None else plain_config(info)
        own = self._check_options("start", options)
        self._is_started = True
        self._at_exit = EndAtExit(self._end_at_exit) if self._used else None

        def begin(tracker: Tracker) -> None:
            tracker.start(run_name, plain, **own.get(tracker.name, {}))
            if plain_plan is not None and isinstance(tracker, PlanTracker):
                tracker.record_plan(plain_plan)
            if plain_info is not None and isinstance(tracker, InfoTracker):
                tracker.record_info(plain_info)

        self._call("start", begin)

    def log(self, values: Metrics, *, step: int | None = None, options: TrackerOptions | None = None) -> None:
        """Log values to every tracker; if one fails, the others still get the values.

        Numbers on a device are copied without a wait for the device: a later call, at the latest `finish`, writes
        their record and raises a tracker's error about it. If the disk is full or fails, media are lost and counted,
        with one warning; the values of the call are still logged.

        Args:
            values: A mapping from names to values, and to media such as `Image`.
            step: The optimizer step that the values belong to, if any.
            options: A mapping from a tracker's name to additional keyword arguments for its `log`; see `start`.

        Raises:
            TypeError: A tracker's `log` does not take an option.
            TrackerStateError: The trackers are not started.
            ValueNotLoggableError: A value has a type that cannot be logged, or a name is reserved.
            TrackerFailedError: A tracker raised an exception; the message names it.
        """
        own = self._check_options("log", options)
        if not self._used:
            return
        if not self._is_started:
            raise TrackerStateError(
                "log() while no run is started: call start(run_name, config) before, of an Accelerator "
                "init_trackers(run_name), and log before the run ends"
            )
        step = checked_step(step)
        check_names(values)
        numbers, media = split_media(values)
        copied = copy_values(numbers)  # which refuses what cannot be logged, before the step counts as logged
        with self._lock:
            now = time.time() if self._log is None else self._log.now()
            stored = self._store(media, time=now) if media else {}
            if media and not stored and not numbers:
                return
            record = LoggedRecord(time=now, step=step, attempt=self._steps.add(step), media=stored)
            self._write(self._numbers.add(copied, (record, own)))

    def expect_repeated_steps(self) -> None:
        """Make the next step begin a new attempt if it was logged before. Called when a checkpoint was restored."""
        self._steps.expect_repeated_steps()

    def finish(self) -> None:
        """Finish every tracker, even if one fails; before `start`, do nothing.

        The run counts as finished. If an exception is being raised, as in a `finally` block, the run counts as
        failed, and so does a run whose process exits without this call.

        Raises:
            TrackerFailedError: A tracker raised an exception; the message names it.
        """
        if not self._is_started:
            return
        self._is_started = False
        state: RunState = "finished"
        if self._at_exit is not None:
            state = self._at_exit.state_now()
            self._at_exit.cancel()
        try:
            with self._lock:
                self._write(self._numbers.drain())
        finally:
            self._call(
                "finish",
                lambda tracker: tracker.end(state) if isinstance(tracker, StateTracker) else tracker.finish(),
            )
            if self._temporary is not None:
                self._temporary.cleanup()

    def _end_at_exit(self, state: RunState) -> None:
        """End the log and the platforms of this process, without a wait for writer processes, which read the log."""
        self._is_started = False
        self._call(
            "the end of the process",
            lambda tracker: tracker.end(state) if isinstance(tracker, StateTracker) else None,
        )

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()  # times, steps and what is pending have one order

    @property
    def _steps(self) -> StepOrder:
        return self._own_steps if self._log is None else self._log.steps

    def _store(self, media: Mapping[str, Medium], *, time: float) -> dict[str, StoredMedium]:
        try:
            if self._log is not None:
                return store_media(media, self._log.path.parent / "media", time=time)
            self._temporary = self._temporary or tempfile.TemporaryDirectory(prefix="drivetrain-media-")
            return store_media(media, Path(self._temporary.name), time=time)
        except DiskError as error:
            if self._log is None:
                logger.warning("%s: %s; training goes on without these media", ", ".join(media), error)
            else:
                self._log.lose(error)
            return {}

    def _write(self, ready: Sequence[tuple[_Logged, dict[str, Plain]]]) -> None:
        for (logged, options), plain in ready:
            record = replace(logged, values=plain)
            what = "log" if record.step is None else f"log of step {record.step}"
            self._call(what, partial(self._write_to, record=record, options=options))

    def _write_to(self, tracker: Tracker, *, record: LoggedRecord, options: TrackerOptions) -> None:
        own = options.get(tracker.name, {})
        if tracker.name in self._platforms and not own:
            cast("PlatformTracker", tracker).write([record])
        elif record.values or not record.media:
            tracker.log(record.values, step=record.step, **own)

    def _check_options(
        self, method: Literal["start", "log"], options: TrackerOptions | None
    ) -> TrackerOptions:
        """Return the options after checking them on every rank, so that all ranks raise or no rank does."""
        for name, given in (options or {}).items():
            if name in self._by_name:
                check_options(self._by_name[name], method, given)
            elif name not in self._left_out and self._is_main:
                self._left_out.add(name)
                logger.warning(
                    "options for the tracker %r are left out: it is %s", name, self._describe_used()
                )
        return options or {}

    def _describe_used(self) -> str:
        return f"not in use, only {', '.join(map(repr, self.names)) or 'none'}"

    def _call(self, what: str, call: Callable[[Tracker], None]) -> None:
        failures: dict[str, Exception] = {}
        for tracker in self._used:
            try:
                call(tracker)
            except Exception as error:  # noqa: BLE001 - reported below, after the other trackers were called
                text = f"tracker {tracker.name!r} failed in {what}: {type(error).__name__}: {error}"
                failures[text] = error
        if failures and self._settings.on_error == "raise":
            raise TrackerFailedError("; ".join(failures)) from next(iter(failures.values()))
        for text in failures:
            logger.warning("%s", text)
