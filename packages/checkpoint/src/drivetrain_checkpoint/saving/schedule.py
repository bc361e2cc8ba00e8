"""Decide when to save: at intervals of steps or minutes, and on signals and requests that end the run."""

import atexit
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from drivetrain_checkpoint.saving.stop_step import AgreedStep
from drivetrain_checkpoint.settings import CheckpointSettings
from drivetrain_state import Context, control_store

# The exit code of a program that has saved and is to be restarted: EX_TEMPFAIL of sysexits.h, "try again later".
RESUME_EXIT_CODE = 75
_STEPS = "steps"
_MINUTES = "minutes"
_SECONDS_IN_A_MINUTE = 60


@dataclass(frozen=True, slots=True)
class SaveReason:
    """The reasons why a save is due.

    Attributes:
        reasons: The reasons: `"steps"`, `"minutes"`, names of signals, or reasons given to `request_stop`.
        stop: The signal or request for which the run must end; None if the run goes on.
    """

    reasons: tuple[str, ...]
    stop: str | None


class SaveSchedule:
    """A schedule that decides after each optimizer step whether a save is due, identically on all ranks.

    Until `close`, it handles the signals of `settings.save_on_signals`, and calls their previous handlers too. A
    repeated signal has no further effect: a scheduler and a launcher often both send it. After a stop and `close`, a
    signal ends the process with `RESUME_EXIT_CODE`, if the process is not ending already.

    Args:
        context: The context of this process.
        settings: The `checkpoint` section; only `save_every_steps`, `save_every_minutes`, `save_on_signals` and
            `stall_seconds` are used.

    Raises:
        ValueError: The system has no such signal, or this is not the main thread.
    """

    def __init__(self, context: Context, settings: CheckpointSettings) -> None:
        self._settings = settings
        self._is_main = context.topology.is_main
        self._agreed = AgreedStep(
            control_store(context, "drivetrain_save_step"),
            topology=context.topology,
            patience_seconds=settings.stall_seconds,
        )
        self._saved_at = time.monotonic()
        self._has_asked = False
        self._has_stopped = False
        self._handlers: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None] = {}
        for name in settings.save_on_signals:
            if (number := getattr(signal.Signals, name, None)) is None:
                raise ValueError(f"save_on_signals={name!r}: this system has no such signal; leave it out")
            self._handlers[number] = signal.signal(number, self._handle)
        context.before_close(self.close)

    def request_stop(self, reason: str) -> None:
        """Ask all ranks to save after the same step and to end. May be called on any rank, by any thread.

        Args:
            reason: The reason why the run ends, in words for the log.

        Raises:
            ValueError: The reason is empty, or is "steps" or "minutes", which are names of intervals.
        """
        if reason in ("", _STEPS, _MINUTES):
            raise ValueError(
                f"reason={reason!r}: say what the run ends for, such as 'the memory limit is near'"
            )
        self._agreed.ask(reason)

    def due(self, step: int) -> SaveReason | None:
        """Return why a save is due after a step, or None. Called on all ranks, by the main thread, once per step.

        Raises:
            OtherRankFailedError: A rank does not answer within `settings.stall_seconds`.
        """
        settings = self._settings
        reasons: list[str] = []
        if settings.save_every_steps is not None and step % settings.save_every_steps == 0:
            reasons.append(_STEPS)
        if self._is_main and settings.save_every_minutes is not None and not self._has_asked:
            minutes = (time.monotonic() - self._saved_at) / _SECONDS_IN_A_MINUTE
            if minutes >= settings.save_every_minutes:
                self._agreed.ask(_MINUTES)
                self._has_asked = True
        reasons.extend(self._agreed.reached(step))
        if not reasons:
            return None
        self._saved_at, self._has_asked = time.monotonic(), self._has_asked and _MINUTES not in reasons
        stop = next((reason for reason in reasons if reason not in (_STEPS, _MINUTES)), None)
        self._has_stopped = self._has_stopped or stop is not None
        return SaveReason(tuple(reasons), stop)

    def close(self) -> None:
        """Restore the previous signal handlers. After a stop, a fatal signal still ends the process with code 75."""
        for number, handler in self._handlers.items():
            if self._has_stopped and handler is signal.SIG_DFL:
                signal.signal(number, _end_saved)
                # Python's end would restore the default.
                atexit.register(signal.signal, number, signal.SIG_IGN)
            else:
                signal.signal(number, handler)
        self._handlers = {}
        self._agreed.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._handlers[signal.Signals(number)]
        self._agreed.ask(signal.Signals(number).name)
        if callable(before):
            before(number, frame)


def _end_saved(number: int, frame: FrameType | None) -> None:
    """End the process with the exit code of a saved run, unless the process is ending already.

    A process takes a second to end. In that second, a launcher that learns of the stop late may signal its ranks. A
    rank killed by the signal would look as if nothing was saved.
    """
    del number, frame
    if not isinstance(sys.exception(), SystemExit):
        raise SystemExit(RESUME_EXIT_CODE)
