"""When to save: after so many steps or minutes, and before the run is taken off its machine."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from drivetrain_checkpoint.saving.stop_step import AgreedStep
from drivetrain_checkpoint.settings import CheckpointSettings
from drivetrain_state import Context, side_store

# What a program ends with that has saved and wants to be started again: EX_TEMPFAIL of sysexits.h, "try again later".
RESUME_EXIT_CODE = 75
_MINUTES = "minutes"
_SECONDS_IN_A_MINUTE = 60


@dataclass(frozen=True, slots=True)
class Due:
    """Why a save is due.

    Attributes:
        reasons: `"steps"`, `"minutes"`, or signals' names.
        signal: The signal that wants the run to end; None if none does.
    """

    reasons: tuple[str, ...]
    signal: str | None


class SaveSchedule:
    """Says on all ranks alike whether a save is due, once after each optimizer step.

    While it is open it handles the signals of `settings.save_on_signals`; what handled one before is called too. A
    signal that comes again changes nothing: a scheduler and a launcher often both send it.

    Args:
        context: This process among the others.
        settings: `save_every_steps`, `save_every_minutes`, `save_on_signals`.

    Raises:
        ValueError: The system has no such signal, or this is not the main thread.
    """

    def __init__(self, context: Context, settings: CheckpointSettings) -> None:
        self._settings = settings
        self._is_main = context.topology.is_main
        self._agreed = AgreedStep(
            side_store(context, "drivetrain_save_step"),
            rank=context.topology.rank,
            world_size=context.topology.world_size,
            patience_seconds=settings.stall_seconds,
        )
        self._saved_at = time.monotonic()
        self._has_asked = False
        self._handlers: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None] = {}
        for name in settings.save_on_signals:
            if (number := getattr(signal.Signals, name, None)) is None:
                raise ValueError(f"save_on_signals={name!r}: this system has no such signal; leave it out")
            self._handlers[number] = signal.signal(number, self._handle)
        context.before_close(self.close)

    def due(self, step: int) -> Due | None:
        """Whether a save is due after a step. Called on all ranks, by the main thread, once a step.

        Raises:
            OtherRankFailedError: A rank does not answer.
        """
        settings = self._settings
        reasons: list[str] = []
        if settings.save_every_steps is not None and step % settings.save_every_steps == 0:
            reasons.append("steps")
        if self._is_main and settings.save_every_minutes is not None and not self._has_asked:
            minutes = (time.monotonic() - self._saved_at) / _SECONDS_IN_A_MINUTE
            if minutes >= settings.save_every_minutes:
                self._agreed.ask(_MINUTES)
                self._has_asked = True
        if (decision := self._agreed.reached(step)) is not None:
            reasons.extend(decision.reasons)
        if not reasons:
            return None
        self._saved_at, self._has_asked = time.monotonic(), self._has_asked and _MINUTES not in reasons
        return Due(tuple(reasons), next((name for name in reasons if name in settings.save_on_signals), None))

    def close(self) -> None:
        """Give the signals back to what handled them."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}
        self._agreed.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._handlers[signal.Signals(number)]
        self._agreed.ask(signal.Signals(number).name)
        if callable(before):
            before(number, frame)
