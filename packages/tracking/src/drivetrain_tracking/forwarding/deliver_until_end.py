"""Deliver a log while it grows, until the log's run has ended; the writer process and replay use this module."""

import logging
import time
from collections.abc import Callable

from drivetrain_tracking.forwarding.delivery import Delivery
from drivetrain_tracking.forwarding.forwarder import Forwarder

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 60.0


def deliver_until_end(
    forwarder: Forwarder,
    *,
    seconds_after_end: float,
    is_over: Callable[[], bool],
    on_progress: Callable[[Delivery], None] = lambda _: None,
) -> bool:
    """Deliver a log until its run has ended; if the platform fails, try again after pauses that double.

    Once `is_over` returns True, attempts that make no progress go on for `seconds_after_end`.

    Returns:
        Whether all records were delivered, including the end of a run that was killed.
    """
    pause = _FIRST_PAUSE_SECONDS
    failing_at, failing_since = -1, 0.0  # an offset in the log, and a time

    def has_run_ended() -> bool:
        return is_over() or forwarder.log_has_ended()

    while True:
        # Asked before the log is read, so that its last lines are read as well.
        was_over, had_ended = is_over(), has_run_ended()
        try:
            has_ended = forwarder.deliver(on_progress=on_progress)
            if was_over and not has_ended:
                forwarder.end_killed()
        except Exception as error:  # noqa: BLE001 - a platform may raise anything, and may be back later
            now, has_progressed = time.monotonic(), forwarder.delivery.offset != failing_at
            if has_progressed or not was_over:
                failing_at, failing_since = forwarder.delivery.offset, now
            if has_progressed:
                pause = _FIRST_PAUSE_SECONDS
            if was_over and now + pause > failing_since + seconds_after_end:
                logger.error("%s: %s; given up", type(error).__name__, error)
                return False
            logger.warning("%s: %s; tried again in %g s", type(error).__name__, error, pause)
            until = time.monotonic() + pause
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            while (left := until - time.monotonic()) > 0:
                if not had_ended and has_run_ended():
                    # Little time is left from the run's end on: a long pause is cut there.
                    pause = _FIRST_PAUSE_SECONDS
                    break
                time.sleep(min(left, _POLL_SECONDS))
            continue
        pause = _FIRST_PAUSE_SECONDS
        if has_ended or was_over:
            return True
        time.sleep(_POLL_SECONDS)
