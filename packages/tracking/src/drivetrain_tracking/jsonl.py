"""The log of a run: a JSON Lines file that every tracker can be fed from, without dependencies.

`DIRECTORY/log.jsonl` holds one object per line, each with a checksum (`spool/line.py`):

```text
{"event": "start", "time": 1763690000.1, "run": "bytes", "config": {"lr": 0.001}, "crc": "9a0364b9"}
{"step": 10, "time": 1763690003.9, "loss": 2.31, "lr": {"encoder": 0.001}, "crc": "5e3b12af"}
{"event": "finish", "time": 1763690100.0, "crc": "0c9a2f4e"}
```

A resumed run appends to the same file; its start line has the last step before the resume, and that step's attempt.
Repeated steps have an `"attempt": 2`, or 3, and so on.
"""

import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from drivetrain_tracking.errors import TrackerStateError, ValueNotLoggableError
from drivetrain_tracking.media.media_store import describe_medium
from drivetrain_tracking.protocol import Metrics
from drivetrain_tracking.run.run_state import RunState, in_forked_children
from drivetrain_tracking.spool.line import LOG_NAME, RESERVED_NAMES
from drivetrain_tracking.spool.spool import Spool
from drivetrain_tracking.spool.spool_reader import SpoolReader
from drivetrain_tracking.spool.steps import StepOrder, checked_step
from drivetrain_tracking.values.plain import Plain, plain_config, plain_values
from drivetrain_tracking.values.records import ALL_MEDIA, LoggedRecord, count_first_held

_TAIL_BYTES = 1 << 20  # of an earlier log, to find its last step; doubled until it is found


class JSONLTracker:
    """A tracker that writes `DIRECTORY/log.jsonl`.

    When a call returns, its line is with the operating system: if a signal ends this process, no line is lost. Every
    `flush_seconds` the lines go to the disk: if the machine goes down, only later lines are lost. A full disk does
    not stop training; see `Spool`. Any thread may log.

    NaN and infinities, which JSON lacks, are written as the strings `"NaN"`, `"Infinity"` and `"-Infinity"`, which
    Python's `float()` parses.

    Args:
        directory: The directory of the file, created by `start`.
        flush_seconds: The time between flushes to the disk.

    Attributes:
        name: The tracker's name, `"jsonl"`.
        on_all_ranks: Always False: only rank 0 writes.
        media_kinds: Every kind: media are files beside the log.
        path: The absolute path of the file.
        steps: The order of the steps, which `start` continues from an earlier run in the file.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     tracker = JSONLTracker(folder)
        ...     tracker.start("project", {"lr": 0.1})
        ...     tracker.log({"loss": 0.5}, step=1)
        ...     tracker.finish()
    """

    name = "jsonl"
    on_all_ranks = False
    media_kinds = ALL_MEDIA

    def __init__(self, directory: Path | str, *, flush_seconds: float = 1.0) -> None:
        self.path = Path(directory).absolute() / LOG_NAME
        self.steps = StepOrder()
        self._flush_seconds = flush_seconds
        self._spool: Spool | None = None
        self._time = 0.0
        self._renew_lock()
        in_forked_children(self, JSONLTracker._renew_lock)

    def start(self, run_name: str, config: Metrics) -> None:
        """Open the file for appending.

        Raises:
            TrackerStateError: The tracker is already started.
            SpoolInUseError: Another run writes to the file.
            ValueNotLoggableError: `config` holds a value that JSON cannot represent.
        """
        if self._spool is not None:
            raise TrackerStateError(f"start() again, while {self.path} is open: finish() first")
        plain = plain_config(config)
        self._spool = Spool(self.path, flush_seconds=self._flush_seconds)
        self.steps, self._time = _end_of_log(self.path)
        line: dict[str, Plain] = {"event": "start", "time": self.now(), "run": run_name, "config": plain}
        if self.steps.last_step is not None:
            line |= {"last_step": self.steps.last_step, "attempt": self.steps.attempt}
        self._open_spool().append(line)

    def record_plan(self, plan: Metrics) -> None:
        """Write the effective plan."""
        self._open_spool().append({"event": "plan", "time": self.now(), "plan": plain_config(plan)})

    def record_info(self, info: Metrics) -> None:
        """Write the run's surroundings: commit, versions, hardware, command line."""
        self._open_spool().append({"event": "info", "time": self.now(), "info": plain_config(info)})

    def log(self, values: Metrics, *, step: int | None = None) -> None:
        """Append a line with the values.

        Raises:
            TrackerStateError: The tracker is not started.
            ValueNotLoggableError: A value has a type that cannot be logged, or its name is reserved.
        """
        step = checked_step(step)
        plain = plain_values(values)
        check_names(plain)
        self._open_spool()
        with self._lock:
            attempt = self.steps.add(step)
            self.write([LoggedRecord(time=self.now(), step=step, attempt=attempt, values=plain)])

    def lose(self, error: OSError) -> None:
        """Count media or a record that could not be written to the disk; warn of the first loss."""
        self._open_spool().lose(error)

    def write(self, records: Sequence[LoggedRecord]) -> None:
        """Append a line for each record; `check_names` has already checked the names."""
        for record in records:
            line: dict[str, Plain] = {} if record.step is None else {"step": record.step}
            line["time"] = record.time
            if record.attempt > 1:
                line["attempt"] = record.attempt
            line.update(record.values)
            if record.media:
                folder = self.path.parent
                line["media"] = {name: describe_medium(one, folder) for name, one in record.media.items()}
            self._open_spool().append(line)

    def count_held(self, records: Sequence[LoggedRecord]) -> int:
        """Count the records whose times the file holds."""
        times = {record["time"] for _, record in SpoolReader(self.path).read() if "event" not in record}
        return count_first_held(records, times)

    def finish(self) -> None:
        """Write the last line of a finished run, and close the file."""
        self.end("finished")

    def end(self, state: RunState | None) -> None:
        """Write how the run ended as the last line, and close the file; None writes no line."""
        if self._spool is None:
            return
        if state is not None:
            line: dict[str, Plain] = {"event": "finish", "time": self.now()}
            self._open_spool().append(line if state == "finished" else {**line, "state": state})
        self._spool.close()
        self._spool = None

    def now(self) -> float:
        """Return the time, always later than the last record's: the time identifies a record."""
        self._time = max(time.time(), math.nextafter(self._time, math.inf))
        return self._time

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()  # steps, times and lines have one order

    def _open_spool(self) -> Spool:
        if self._spool is None:
            raise TrackerStateError(f"log() before start(): call start(run_name, config) first ({self.path})")
        return self._spool


def check_names(values: Mapping[str, Any]) -> None:
    """Check that values have names, and that the log reserves none of these names."""
    if not isinstance(cast("object", values), Mapping):
        raise ValueNotLoggableError(
            f"log({values!r}): give values by name, such as log({{'loss': 0.3}}, step=1)"
        )
    for name in RESERVED_NAMES:
        if name in values:
            raise ValueNotLoggableError(
                f"values[{name!r}]: the name is the log's own; choose another"
                + (", or say step=... instead" if name == "step" else "")
            )


def _end_of_log(path: Path) -> tuple[StepOrder, float]:
    """Return the order of steps at the end of an earlier log, and the time of its last record."""
    size = path.stat().st_size
    tail = min(_TAIL_BYTES, size)
    while True:
        last_step, attempt, last_time = None, 1, 0.0
        for _, record in SpoolReader(path, size - tail).read():
            last_time = max(last_time, record.get("time", 0.0))
            step = record.get("last_step" if record.get("event") == "start" else "step")
            if step is not None:
                of_record = record.get("attempt", 1)
                last_step = step if last_step is None or of_record > attempt else max(last_step, step)
                attempt = max(attempt, of_record)
        if last_step is not None or tail == size:
            return StepOrder(last_step, attempt), last_time
        tail = min(2 * tail, size)  # an event, such as the difference to a commit, may be longer than that
