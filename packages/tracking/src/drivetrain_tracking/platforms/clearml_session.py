"""ClearML's offline sessions as folders: which records they hold, and what a kill cut off."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drivetrain_tracking.compat import CLEARML_EVENTS

TIME_TITLE, TIME_SERIES = "drivetrain", "time"


class EventFile:
    """A reader of a session's events, which continues where its last read ended.

    Args:
        folder: The session's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / CLEARML_EVENTS
        self._offset = 0

    def times(self) -> list[float]:
        """Return the times of the records that were added since the last call."""
        return [float(event["value"]) for events in self._lines() for event in events if is_time(event)]

    def _lines(self) -> Iterator[list[dict[str, Any]]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            yield json.loads(line)


def drop_cut_record(folder: Path) -> None:
    """Remove what follows the last whole record of a session that was killed: it is written again."""
    path = folder / CLEARML_EVENTS
    if not path.exists():
        return
    data = path.read_bytes()
    events = [event for line in data[: data.rfind(b"\n") + 1].splitlines() for event in json.loads(line)]
    last = max((number for number, event in enumerate(events) if is_time(event)), default=-1)
    beside = path.with_suffix(".new")
    beside.write_text("".join(json.dumps([event]) + "\n" for event in events[: last + 1]))
    beside.replace(path)


def is_time(event: dict[str, Any]) -> bool:
    """Return whether an event is the scalar that ends a record, and holds its time."""
    return event.get("metric") == TIME_TITLE and event.get("variant") == TIME_SERIES
