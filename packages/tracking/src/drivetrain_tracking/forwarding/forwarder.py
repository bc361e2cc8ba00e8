"""Deliver the records of a spool to a tracker in order: at once, again while a platform is down, on after a kill."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from drivetrain_tracking.errors import ValueNotLoggableError
from drivetrain_tracking.forwarding.delivery import Delivery, delivery_path
from drivetrain_tracking.protocol import Tracker
from drivetrain_tracking.spool.reader import SpooledRecord, SpoolReader

logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 60.0
_HEAD = ("step", "time")  # of a record of values, beside the values themselves


class Forwarder:
    """The delivery of one spool to one tracker. Not thread-safe.

    A record that the tracker refuses as such, by a `ValueNotLoggableError`, is counted and passed over. Any other
    error is one of the platform: the record is tried again, after pauses that double up to a minute.

    Args:
        path: The spool.
        tracker: The tracker, which is not started yet.
        pause: A function that waits some seconds; replaced to end a wait early.

    Attributes:
        delivery: How far the spool is delivered.
    """

    def __init__(self, path: Path, tracker: Tracker, *, pause: Callable[[float], object] = time.sleep) -> None:
        self._place = delivery_path(path, tracker.name)
        self.delivery = Delivery.load(self._place)
        self._reader = SpoolReader(path, self.delivery.offset)
        self._tracker = tracker
        self._pause = pause
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        self._waiting: list[SpooledRecord] = []
        self._is_started = False

    def deliver(self) -> bool:
        """Deliver what is there by now; return False if the platform failed, after a pause."""
        self._waiting += self._reader.read()
        before = self.delivery
        try:
            while self._waiting:
                self._deliver(self._waiting[0])
                self._waiting.pop(0)
        except Exception as error:  # noqa: BLE001 a platform may raise anything, and may be back later
            logger.warning(
                "tracker %r: %s: %s; tried again in %g s", self._tracker.name, type(error).__name__, error, self._pause_seconds
            )
            self._pause(self._pause_seconds)
            self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_PAUSE_SECONDS)
            return False
        finally:
            if self.delivery != before:
                self.delivery.save(self._place)
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        return True

    def finish(self) -> None:
        """End the platform's run, if it was started."""
        if self._is_started:
            self._is_started = False
            self._tracker.finish()

    def _deliver(self, found: SpooledRecord) -> None:
        refused = 0
        try:
            self._send(found.record)
        except ValueNotLoggableError as error:
            refused = 1
            logger.warning("tracker %r does not take a record: %s", self._tracker.name, error)
        self.delivery = replace(
            self.delivery,
            offset=found.end,
            num_delivered=self.delivery.num_delivered + 1 - refused,
            num_refused=self.delivery.num_refused + refused,
        )

    def _send(self, record: dict[str, Any]) -> None:
        event = record.get("event")
        if event == "start":
            self.finish()
            self._tracker.start(record["run"], record["config"])
            self._is_started = True
        elif event == "finish":
            self.finish()
        elif event is None:
            values = {name: value for name, value in record.items() if name not in _HEAD}
            self._tracker.log(values, step=record.get("step"))
