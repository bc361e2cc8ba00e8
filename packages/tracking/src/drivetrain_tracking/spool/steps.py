"""Distinguish repeated steps of a resumed run from new ones."""

import logging
import operator
from contextlib import suppress
from typing import Any

from drivetrain_tracking.errors import ValueNotLoggableError

logger = logging.getLogger(__name__)


class StepOrder:
    """A count of the attempts of a run. Not thread-safe.

    A run that resumes from a checkpoint may repeat steps. The repeated steps are a new attempt, so that neither curve
    silently replaces the other.
    """

    def __init__(self, last_step: int | None = None, attempt: int = 1) -> None:
        self.attempt = attempt  # of the next step
        self.last_step = last_step
        self._may_repeat = last_step is not None
        self._has_warned = False

    def expect_repeated_steps(self) -> None:
        """Expect repeated steps after a restored checkpoint: a next step not above the last begins a new attempt."""
        self._may_repeat = True

    def add(self, step: int | None) -> int:
        """Return the attempt that a step belongs to, and remember the step."""
        if step is None:
            return self.attempt
        last = self.last_step
        if last is not None and step <= last and self._may_repeat:
            self.attempt += 1
            logger.info(
                "step %d was logged before, up to step %d: attempt %d begins", step, last, self.attempt
            )
        elif last is not None and step < last and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "step=%d is logged after step %d: it is kept, in the order of the calls (told once a run)",
                step,
                last,
            )
        self._may_repeat = False
        self.last_step = step
        return self.attempt


def checked_step(step: Any) -> int | None:
    """Return a step as an int."""
    if step is None or type(step) is int:
        return step
    if not isinstance(step, bool):
        with suppress(TypeError):
            return operator.index(step)
    raise ValueNotLoggableError(
        f"step={step!r} ({type(step).__name__}): a step is an integer, the number of an optimizer step, or None"
    )
