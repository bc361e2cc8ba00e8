"""The user's line that made an object, from the traces of Python's and of the devices' allocations."""

import linecache
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain_memory.compat import allocation_frames
from drivetrain_memory.leaks.roots import is_users, library_folders


def line_that_made(value: object) -> str | None:
    """Return the file, line and source where an object was made; None if its making was not traced.

    Needs `tracemalloc` to trace when the object is made. A tensor counts as made where its Python object was.
    """
    return _told(allocation_frames(value))


def _told(frames: Iterable[tuple[str, int]]) -> str | None:
    """Return the innermost of the user's frames, given from the inside out."""
    libraries = library_folders()
    for file, line in frames:
        if is_users(file, libraries):
            return f"{Path(file).name}:{line}: {linecache.getline(file, line).strip()}".rstrip(": ")
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGrowth:
    """The growth of a device's memory that one line allocated."""

    line: str
    bytes: int
    count: int


def device_growth(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[DeviceGrowth]:
    """Return the growth between two snapshots of torch's device allocator by line, the largest first."""
    old, new = _by_line(before), _by_line(after)
    grown = [
        DeviceGrowth(line=line, bytes=size - old.get(line, (0, 0))[0], count=count - old.get(line, (0, 0))[1])
        for line, (size, count) in new.items()
    ]
    return sorted((one for one in grown if one.bytes > 0), key=lambda one: -one.bytes)


def _by_line(snapshot: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for segment in snapshot.get("segments", ()):
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                line = _told((one["filename"], one["line"]) for one in block.get("frames", ())) or "unknown"
                size, count = found.get(line, (0, 0))
                found[line] = (size + block["size"], count + 1)
    return found
