"""Write a settings file whole or not at all, and keep the one that was there."""

import os
from contextlib import suppress
from pathlib import Path

from drivetrain_launcher.errors import LaunchError


def backup_of(path: Path) -> Path:
    """Return the path to which an earlier file is moved."""
    return path.with_name(f"{path.name}.bak")


def write_settings(path: Path, text: str) -> Path | None:
    """Write a settings file.

    Returns:
        The path of the copy of the file that was there; None if there was none.

    Raises:
        LaunchError: The file cannot be written.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = backup_of(path) if path.exists() else None
        if kept is not None:
            kept.write_bytes(path.read_bytes())
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        with suppress(OSError):  # it may not even be there
            beside.unlink()
        raise LaunchError(
            f"{path}: cannot be written: {error.strerror}; say --output FILE in a folder that you may write to"
        ) from error
    return kept
