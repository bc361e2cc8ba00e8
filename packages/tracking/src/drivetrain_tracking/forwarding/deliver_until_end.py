"""Deliver a log while it grows, until its run has ended; used by the process beside the training, and by replay."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from drivetrain_tracking.forwarding.delivery import Delivery
from drivetrain_tracking.forwarding.forwarder import Forwarder

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryLimits:
    """The limits at which a delivery gives up.

    Attributes:
        seconds_after_end: The seconds for which a failing platform is tried again once nothing more is logged.
        is_over: A function that returns whether nothing more will be logged.
        sleep: A function that waits some seconds.
    """

    seconds_after_end: float
    is_over: Callable[[], bool]
    sleep: Callable[[float], object] = time.sleep


def deliver_until_end(
    forwarder: Forwarder, limits: DeliveryLimits, *, on_progress: Callable[[Delivery], None] = lambda _: None
) -> bool:
    """Deliver a log until nothing more is logged; try again, with doubling pauses, while the platform fails.

    Args:
        forwarder: The delivery to carry out.
        limits: When it gives up.
        on_progress: A function that is called after each batch.

    Returns:
        Whether all records were delivered.
    """
    pause = _FIRST_PAUSE_SECONDS
    end_of_patience: float | None = None
    while True:
        was_over = limits.is_over()  # before the log is read, so that its last lines are read as well
        if was_over and end_of_patience is None:
            end_of_patience = time.monotonic() + limits.seconds_after_end
        try:
            has_ended = forwarder.deliver(on_progress=on_progress)
        except Exception as error:  # noqa: BLE001 - a platform may raise anything, and may be back later
            if end_of_patience is not None and time.monotonic() + pause > end_of_patience:
                logger.error("%s: %s; given up", type(error).__name__, error)
                return False
            logger.warning("%s: %s; tried again in %g s", type(error).__name__, error, pause)
            limits.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            continue
        pause = _FIRST_PAUSE_SECONDS
        if has_ended or was_over:
            return True
        limits.sleep(_POLL_SECONDS)
