"""A tracker without dependencies that writes JSON Lines.

`DIRECTORY/log.jsonl` holds one object per line:

```text
{"event": "start", "time": 1763690000.1, "run": "bytes", "config": {"lr": 0.001}}
{"step": 10, "time": 1763690003.9, "loss": 2.31, "lr": {"encoder": 0.001}}
{"event": "finish", "time": 1763690100.0}
```

A resumed run appends to the same file, so a step may occur twice: the later line is valid.
"""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from drivetrain_tracking.errors import TrackerStateError, ValueNotLoggableError
from drivetrain_tracking.plain import Plain, plain_config, plain_values
from drivetrain_tracking.protocol import Metrics

_RESERVED = ("step", "time", "event")


class JSONLTracker:
    """A tracker that writes `DIRECTORY/log.jsonl`; each line is in the file when its call returns.

    NaN and infinities, which JSON lacks, are written as the strings `"NaN"`, `"Infinity"` and `"-Infinity"`, which
    Python's `float()` parses.

    Args:
        directory: The directory of the file, created by `start`.

    Attributes:
        name: The tracker's name, `"jsonl"`.
        on_all_ranks: Always False: only rank 0 writes.
        path: The absolute path of the file.
    """

    name = "jsonl"
    on_all_ranks = False

    def __init__(self, directory: Path | str) -> None:
        self.path = Path(directory).absolute() / "log.jsonl"
        self._file: BinaryIO | None = None

    def start(self, run_name: str, config: Metrics) -> None:
        """Open the file for appending, and remove a partial last line that a killed run left.

        Raises:
            TrackerStateError: The tracker is already started.
            ValueNotLoggableError: `config` holds a value that JSON cannot represent.
        """
        if self._file is not None:
            raise TrackerStateError(f"start() again, while {self.path} is open: finish() first")
        plain = plain_config(config)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _cut_unfinished_line(self.path)
        self._file = self.path.open("ab")
        self._write({"event": "start", "time": time.time(), "run": run_name, "config": plain})

    def log(self, values: Metrics, *, step: int | None = None) -> None:
        """Append a line with the values.

        Raises:
            TrackerStateError: The tracker is not started.
            ValueNotLoggableError: A value has a type that cannot be logged, or its name is reserved.
        """
        for name in _RESERVED:
            if name in values:
                raise ValueNotLoggableError(
                    f"values[{name!r}]: the name is the file's own; choose another"
                    + (", or say step=... instead" if name == "step" else "")
                )
        head: dict[str, Plain] = {} if step is None else {"step": int(step)}
        self._write({**head, "time": time.time(), **plain_values(values)})

    def finish(self) -> None:
        """Write the last line and close the file."""
        if self._file is None:
            return
        self._write({"event": "finish", "time": time.time()})
        self._file.close()
        self._file = None

    def _write(self, record: Mapping[str, Plain]) -> None:
        if self._file is None:
            raise TrackerStateError(f"log() before start(): call start(run_name, config) first ({self.path})")
        self._file.write(json.dumps(_strict(dict(record)), allow_nan=False).encode() + b"\n")
        self._file.flush()


def _strict(value: Plain) -> Plain:
    """Return the value with NaN and infinities replaced by strings that JavaScript and Python parse as numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strict(item) for item in value]
    return value


def _cut_unfinished_line(path: Path) -> None:
    """Truncate a file after its last newline."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 2**16)
            file.seek(start)
            if (found := file.read(end - start).rfind(b"\n")) >= 0:
                file.truncate(start + found + 1)
                return
            end = start
        file.truncate(0)
