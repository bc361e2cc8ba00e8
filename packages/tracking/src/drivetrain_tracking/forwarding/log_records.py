"""Turn lines of a log into records for a platform."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from drivetrain_tracking.media.media_store import read_medium
from drivetrain_tracking.spool.line import NOT_FINITE, RESERVED_NAMES
from drivetrain_tracking.values.plain import Plain
from drivetrain_tracking.values.records import LoggedRecord


def logged_record(line: Mapping[str, Any], folder: Path) -> LoggedRecord:
    """Return the record of a line of values.

    Args:
        line: The line, parsed.
        folder: The folder of the log, which media are relative to.
    """
    values = {name: value for name, value in line.items() if name not in RESERVED_NAMES}
    return LoggedRecord(
        time=line["time"],
        step=line.get("step"),
        attempt=line.get("attempt", 1),
        values=cast("Mapping[str, Plain]", numbers_restored(values)),
        media={name: read_medium(entry, folder) for name, entry in line.get("media", {}).items()},
    )


def numbers_restored(value: Any) -> Any:
    """Return a value of a log with the floats that JSON lacks, which stand there as strings."""
    if isinstance(value, str):
        return NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {name: numbers_restored(item) for name, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [numbers_restored(item) for item in cast("list[Any]", value)]
    return value
