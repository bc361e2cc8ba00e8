"""The entry of a medium in the log: its kind, its file relative to the log, its plain data, its caption."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain_tracking.plain import Plain
from drivetrain_tracking.records import StoredMedium


def describe_medium(medium: StoredMedium, folder: Path) -> dict[str, Plain]:
    """Return the entry of a medium in a log that stands in `folder`."""
    entry: dict[str, Plain] = {"kind": medium.kind}
    if medium.path is not None:
        inside = medium.path.is_relative_to(folder)
        entry["file"] = medium.path.relative_to(folder).as_posix() if inside else str(medium.path)
    if medium.data is not None:
        entry["data"] = medium.data
    if medium.caption:
        entry["caption"] = medium.caption
    return entry


def read_medium(entry: Mapping[str, Any], folder: Path) -> StoredMedium:
    """Return the medium of an entry in a log that stands in `folder`."""
    file = entry.get("file")
    return StoredMedium(
        kind=entry["kind"],
        path=None if file is None else folder / file,
        data=entry.get("data"),
        caption=entry.get("caption", ""),
    )
