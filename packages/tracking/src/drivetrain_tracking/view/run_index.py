"""The index of one run: the run's curves and facts, built from its log while other threads read the index."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard, get_args

from drivetrain_tracking.run.run_state import RunState
from drivetrain_tracking.spool.line import NOT_FINITE, RESERVED_NAMES
from drivetrain_tracking.values.plain import Plain
from drivetrain_tracking.values.records import flat_values
from drivetrain_tracking.view.curve import Curve
from drivetrain_tracking.view.log_reader import LogPlace, LogReader
from drivetrain_tracking.view.media import LoggedMedium, read_media

_MOST_STEP = 2**63 - 1  # what an array of 64-bit integers holds
_MOST_SECONDS = 1e12

Rows = dict[str, tuple[list[int], list[float], list[float]]]


@dataclass(slots=True, kw_only=True)
class RunFacts:
    """The facts in a run's log, besides curves."""

    run_name: str = ""
    config: Mapping[str, Plain] = field(default_factory=dict[str, Plain])  # of the newest start
    plan: Mapping[str, Plain] = field(default_factory=dict[str, Plain])
    info: Mapping[str, Plain] = field(default_factory=dict[str, Plain])  # commit, versions, hardware, command
    start_time: float | None = None  # of the first record, in seconds since the epoch; None before
    last_time: float = 0.0
    last_step: int | None = None  # the newest one
    attempt: int = 1  # that of the newest step
    ended: RunState | None = None  # None while the run goes on, or where nothing could write its end
    num_damaged: int = 0
    num_lost: int = 0  # records that the run itself could not write
    num_foreign: int = 0  # lines that hold JSON of another kind
    texts: dict[str, str] = field(default_factory=dict[str, str])  # the newest of each name
    media: list[LoggedMedium] = field(default_factory=list[LoggedMedium])


class RunIndex:
    """The index of one run. One thread calls `advance`; any thread reads, while it holds `lock`."""

    def __init__(self, place: LogPlace) -> None:
        self.place = place
        self.lock = threading.Lock()
        self.facts = RunFacts()
        self.curves: dict[str, Curve] = {}  # by metric, in the order of their first value
        self.version = 0  # one more with each change
        self.problem = ""  # why the log cannot be read at present; empty if it can
        self.read_bytes = 0
        self.size_bytes = 0
        self._reader = LogReader(place.path)
        self._num_values = 0  # lines of values, which count as steps where none are logged
        self._may_repeat = False  # True between the start of a resumed run and its first step

    def advance(self) -> bool:
        """Read the next part of the log, and return whether more is left. If the log is unreadable, set `problem`."""
        try:
            chunk = self._reader.read()
        except OSError as error:
            is_gone = isinstance(error, FileNotFoundError)
            problem = f"the log cannot be read: {error.strerror}"
            problem = "the log is gone; what was read before is shown" if is_gone else problem
            with self.lock:
                self.version += problem != self.problem
                self.problem = problem
            return False
        rows: dict[int, Rows] = {}
        with self.lock:
            self.version += bool(chunk.records or chunk.num_damaged or chunk.is_replaced or self.problem)
            self.problem = ""
            if chunk.is_replaced:
                self.facts, self.curves, self._num_values, self._may_repeat = RunFacts(), {}, 0, False
            self.facts.num_damaged += chunk.num_damaged
            self.read_bytes, self.size_bytes = self._reader.offset, self._reader.size_bytes
            for record in chunk.records:
                self._take(record, rows)
            for attempt, by_name in rows.items():
                for name, columns in by_name.items():
                    self.curves.setdefault(name, Curve()).extend(attempt, *columns)
        return not chunk.is_last

    def _take(self, record: dict[str, Any], rows: dict[int, Rows]) -> None:
        """Add a record: an event to the facts, values to the rows of their attempt."""
        time, step = record.get("time"), record.get("step")
        if "event" in record:
            self._take_event(record)
        elif not _is_time(time) or not (
            step is None or (type(step) is int and -_MOST_STEP <= step <= _MOST_STEP)
        ):
            self.facts.num_foreign += 1
        else:
            self.facts.ended = None
            self._note_time(time)
            self._take_values(record, self._place(record, step), float(time), rows)
            if "media" in record:
                self.facts.media += read_media(record["media"], step)

    def _note_time(self, time: float) -> None:
        self.facts.last_time = max(self.facts.last_time, time)
        if self.facts.start_time is None:
            self.facts.start_time = time

    def _place(self, record: dict[str, Any], step: int | None) -> int:
        """Return the step of a line of values, and note its attempt."""
        facts = self.facts
        attempt = record.get("attempt", 1)
        if isinstance(attempt, int) and attempt > facts.attempt:
            facts.attempt, self._may_repeat = attempt, False
        self._num_values += 1
        if step is None:  # the step of the line before; in a log without steps, the number of the line
            return self._num_values - 1 if facts.last_step is None else facts.last_step
        # Older logs do not tell attempts: there, a resumed run is a second start and a step that was there before.
        if self._may_repeat and facts.last_step is not None and step <= facts.last_step:
            facts.attempt += 1
        self._may_repeat = False
        facts.last_step = step
        return step

    def _take_values(self, record: dict[str, Any], step: int, time: float, rows: dict[int, Rows]) -> None:
        by_name = rows.setdefault(self.facts.attempt, {})
        nested = False
        for name, value in record.items():
            if type(value) is float and name not in RESERVED_NAMES:
                if (columns := by_name.get(name)) is None:
                    columns = by_name[name] = ([], [], [])
                columns[0].append(step)
                columns[1].append(time)
                columns[2].append(value)
            elif name not in RESERVED_NAMES:
                nested = True
        if nested:
            self._take_others(record, step, time, by_name)

    def _take_others(self, record: dict[str, Any], step: int, time: float, by_name: Rows) -> None:
        """Add the values of a line that are not plain floats: nested values, integers, strings for NaN."""
        others = {
            name: value
            for name, value in record.items()
            if name not in RESERVED_NAMES and type(value) is not float
        }
        for name, value in flat_values(others).items():
            if (number := _number_of(value)) is not None:
                steps, times, numbers = by_name.setdefault(name, ([], [], []))
                steps.append(step)
                times.append(time)
                numbers.append(number)
            elif isinstance(value, str):
                self.facts.texts[name] = value

    def _take_event(self, record: dict[str, Any]) -> None:
        facts, event, time = self.facts, record["event"], record.get("time")
        if _is_time(time):
            self._note_time(time)
        if event == "start":
            facts.ended = None
            self._may_repeat = facts.last_step is not None
            facts.run_name = str(record.get("run", ""))
            facts.config = _mapping_of(record, "config")
        elif event == "plan":
            facts.plan = _mapping_of(record, "plan")
        elif event == "info":
            facts.info = _mapping_of(record, "info")
        elif event == "lost":
            count = record.get("count")
            facts.num_lost += count if isinstance(count, int) else 1
        elif event == "finish":
            state: Any = record.get("state")
            facts.ended = state if state in get_args(RunState) else "finished"


def _is_time(time: object) -> TypeGuard[float]:
    return isinstance(time, (int, float)) and abs(time) < _MOST_SECONDS  # false for NaN too


def _number_of(value: object) -> float | None:
    """Return a value as a number, or None if it is not a number; strings for NaN and infinities are numbers."""
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:  # an integer of more than 308 digits
            return float("inf") if value > 0 else float("-inf")
    return NOT_FINITE.get(value) if isinstance(value, str) else None


def _mapping_of(record: dict[str, Any], name: str) -> Mapping[str, Plain]:
    found = record.get(name)
    return found if isinstance(found, dict) else {}
