"""The media of a run: entries of the run's log, and files of the run's folder that may be served."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from drivetrain_tracking.values.plain import Plain
from drivetrain_tracking.values.records import ALL_MEDIA

# What a browser may show in the page. Other files are downloads: an SVG or an HTML file would run its scripts.
_CONTENT_TYPES: Mapping[str, str] = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
    ".wav": "audio/wav",
    ".mp3": "audio/mpeg",
    ".ogg": "audio/ogg",
    ".mp4": "video/mp4",
    ".webm": "video/webm",
}
DOWNLOAD = "application/octet-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedMedium:
    """A medium as described by a log entry."""

    name: str
    kind: str
    step: int | None
    file: str | None  # its path in the log; None where `data` holds all
    data: Plain  # a table, a histogram or a text
    caption: str


def read_media(entries: object, step: int | None) -> list[LoggedMedium]:
    """Return the media in the member `media` of a record; skip entries of another shape."""
    if not isinstance(entries, dict):
        return []
    return [
        LoggedMedium(
            name=name,
            kind=kind,
            step=step,
            file=entry["file"] if isinstance(entry.get("file"), str) else None,
            data=entry.get("data"),
            caption=str(entry.get("caption", "")),
        )
        for name, entry in cast("dict[str, Any]", entries).items()
        if isinstance(entry, dict) and isinstance(kind := entry.get("kind"), str) and kind in ALL_MEDIA
    ]


def find_medium_file(folder: Path, file: str) -> Path | None:
    """Return the file of a medium; None if it is missing, or outside of the run's folder, directly or by a link."""
    try:
        path = (folder / file).resolve(strict=True)
        inside = path.is_relative_to(folder.resolve(strict=True)) and path.is_file()
    except (OSError, ValueError, RuntimeError):  # no such file; a name with a null byte; a circle of links
        return None
    return path if inside else None


def content_type_of(path: Path) -> str:
    """Return the content type to serve a file as: a picture, a sound, a film, or else a download."""
    return _CONTENT_TYPES.get(path.suffix.lower(), DOWNLOAD)
