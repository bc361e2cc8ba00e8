"""Store the media among logged values, once for all trackers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain_tracking.media.medium import Medium
from drivetrain_tracking.records import StoredMedium


def split_media(values: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Medium]]:
    """Return the values that are no media, and the media; only the outermost level is looked at."""
    media = {name: value for name, value in values.items() if isinstance(value, Medium)}
    if not media:
        return values, media
    return {name: value for name, value in values.items() if name not in media}, media


def store_media(media: Mapping[str, Medium], folder: Path, *, time: float) -> dict[str, StoredMedium]:
    """Store media in `folder`, under names of their time and name."""
    folder.mkdir(parents=True, exist_ok=True)
    stored: dict[str, StoredMedium] = {}
    for name, medium in media.items():
        readable = "".join(one if one.isalnum() or one in "-_" else "-" for one in name)[:60]
        stored[name] = medium.store(folder / f"{round(time * 1e6)}-{len(stored)}-{readable}")
    return stored
