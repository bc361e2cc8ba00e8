"""Write logs of runs as a tracker does, for the tests of the page."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain_tracking.spool.line import LOG_NAME, encode
from drivetrain_tracking.view.log_reader import LogPlace
from drivetrain_tracking.view.run_index import RunIndex

BEGAN = 1_700_000_000.0


def value_lines(steps: Iterable[int], **values: Any) -> list[dict[str, Any]]:
    """Records of a loss that falls, one a second."""
    return [
        {"step": step, "time": BEGAN + step, "loss": 2 * math.exp(-step / 50), **values} for step in steps
    ]


def start_line(name: str = "first", config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"event": "start", "time": BEGAN, "run": name, "config": dict(config or {})}


def write_log(folder: Path, records: Sequence[Mapping[str, Any]], *, damaged: bytes = b"") -> Path:
    """Append records to the log of a folder, and bytes that are no record."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOG_NAME
    with path.open("ab") as file:
        file.write(b"".join(encode(record) for record in records) + damaged)
    return path


def read_whole(path: Path) -> RunIndex:
    index = RunIndex(LogPlace(label=path.parent.name, path=path))
    while index.advance():
        pass
    return index
