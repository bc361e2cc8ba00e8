"""The time that each step spends in each phase, read without waiting for work that still runs on a device."""

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

PHASES = ("data", "forward", "backward", "optimizer", "communication", "checkpoint", "other")


class Clock(Protocol):
    """A clock whose moments may lie ahead: a device's moment is known once the device has reached it."""

    def moment(self) -> Any:
        """Return the present moment of the host, or the moment at which a device finishes all queued work."""
        ...

    def is_past(self, moment: Any) -> bool:
        """Return whether a moment lies in the past. Never waits."""
        ...

    def seconds_between(self, start: Any, end: Any) -> float:
        """Return the seconds between two moments in the past."""
        ...


class HostClock:
    """The clock of the host."""

    def moment(self) -> float:
        """Return the present moment, in seconds."""
        return time.perf_counter()

    def is_past(self, moment: float) -> bool:
        """Return True: moments of the host are known at once."""
        del moment
        return True

    def seconds_between(self, start: float, end: float) -> float:
        """Return the seconds between two moments."""
        return end - start


@dataclass(frozen=True, slots=True)
class _Segment:
    phase: str
    start: Any
    end: Any


class PhaseTimes:
    """A stopwatch of the phases of each step. Phases may nest: an inner phase's time is not part of the outer phase.

    The seconds of a step's phases add up to the time between its end and the end of the step before. Time outside of
    all phases is in "other". Time before the first phase begins is in no step. Not thread-safe.

    Args:
        clock: The clock of the phases; the host's if None.

    Example:
        >>> times = PhaseTimes()
        >>> times.begin("forward"); times.begin("communication"); times.end("communication"); times.end("forward")
        >>> times.end_step()
        >>> sorted(times.take_ready()[0])
        ['communication', 'forward', 'other']
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or HostClock()
        self._open: list[str] = []
        self._since: Any = None
        self._segments: list[_Segment] = []
        # Steps whose end a device has not reached; it is a few steps behind at most, since its queue is limited.
        self._pending: deque[list[_Segment]] = deque()

    @property
    def innermost(self) -> str | None:
        """The innermost open phase; None if no phase is open."""
        return self._open[-1] if self._open else None

    def begin(self, phase: str) -> None:
        """Begin a phase, inside the innermost open phase if there is one."""
        self._cut()
        self._open.append(phase)

    def end(self, phase: str) -> None:
        """End a phase and the phases that an exception left open inside; do nothing if the phase is not open."""
        if phase not in self._open:
            return
        self._cut()
        while self._open.pop() != phase:
            pass

    def skip(self) -> None:
        """Leave the time since the last boundary out of the step."""
        if self._since is not None:
            self._since = self._clock.moment()

    def end_step(self) -> None:
        """End the step and all phases that are still open."""
        if self._since is None:
            return
        self._cut()
        self._open.clear()
        self._pending.append(self._segments)
        self._segments = []

    def take_ready(self) -> list[dict[str, float]]:
        """Return the seconds by phase of each step that is over, in order, and forget these steps. Never waits."""
        ready: list[dict[str, float]] = []
        while self._pending and self._clock.is_past(self._pending[0][-1].end):
            seconds: dict[str, float] = {}
            for segment in self._pending.popleft():
                passed = self._clock.seconds_between(segment.start, segment.end)
                seconds[segment.phase] = seconds.get(segment.phase, 0.0) + passed
            ready.append(seconds)
        return ready

    def _cut(self) -> None:
        now = self._clock.moment()
        if self._since is not None:
            phase = self._open[-1] if self._open else "other"
            self._segments.append(_Segment(phase, self._since, now))
        self._since = now
