"""Store the media among logged values, once for all trackers."""

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain_tracking.errors import ValueNotLoggableError
from drivetrain_tracking.media.medium import Medium
from drivetrain_tracking.values.plain import Plain, are_plain
from drivetrain_tracking.values.records import StoredMedium

# What a disk answers that is full, beyond its quota, read-only or broken.
_OF_THE_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})


class DiskError(OSError):
    """A medium cannot be written, since the disk is full or fails."""


def split_media(values: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Medium]]:
    """Return the values that are not media, and the media; look only at the outermost level."""
    if are_plain(values):
        return values, {}
    media = {name: value for name, value in values.items() if isinstance(value, Medium)}
    return {name: value for name, value in values.items() if name not in media}, media


def store_media(media: Mapping[str, Medium], folder: Path, *, time: float) -> dict[str, StoredMedium]:
    """Store either all media or none in `folder`, in files named by their time and name.

    Raises:
        DiskError: The disk is full or fails.
    """
    stored: dict[str, StoredMedium] = {}
    stem = f"{round(time * 1e6)}-"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, medium in media.items():
            readable = "".join(one if one.isalnum() or one in "-_" else "-" for one in name)[:60]
            try:
                stored[name] = medium.store(folder / f"{stem}{len(stored)}-{readable}")
            except ValueNotLoggableError as error:
                raise ValueNotLoggableError(f"values[{name!r}]: {error}") from error
    except Exception as error:
        for part in folder.glob(f"{stem}*"):
            part.unlink()
        if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
            raise DiskError(error.errno, error.strerror, str(folder)) from error
        raise
    return stored


def describe_medium(medium: StoredMedium, folder: Path) -> dict[str, Plain]:
    """Return the log entry of a medium, for a log in `folder`."""
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
    """Return the medium of a log entry, for a log in `folder`."""
    file = entry.get("file")
    return StoredMedium(
        kind=entry["kind"],
        path=None if file is None else folder / file,
        data=entry.get("data"),
        caption=entry.get("caption", ""),
    )
