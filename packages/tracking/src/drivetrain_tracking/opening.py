"""Open files that must be regular ones: a pipe in a file's place would be waited for, a device may have no end.

Files that a kill must not cut short are replaced whole.
"""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

_MOST_JSON_BYTES = 1 << 26


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file, and return its descriptor. Links are followed; nothing is waited for.

    Raises:
        FileNotFoundError: The path names nothing, and `flags` creates nothing.
        OSError: The path names a pipe, a folder, a socket or a device, or cannot be opened.
    """
    if (
        path.exists() and not path.is_file()
    ):  # a socket cannot be opened, and opening a device may do something
        raise _irregular(path)
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise _irregular(path)
    return file


def read_json(path: Path) -> Any:
    """Read a regular file of JSON.

    Raises:
        OSError: See `open_regular`.
        ValueError: It is no JSON, too long, or nested too deeply.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        text = file.read(_MOST_JSON_BYTES + 1)
    if len(text) > _MOST_JSON_BYTES:
        raise ValueError(f"it holds more than {_MOST_JSON_BYTES} bytes")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def replace_text(path: Path, text: str) -> None:
    """Write a file by a rename, so that a process that is killed leaves the old content or the new one."""
    written = path.with_name(f"{path.name}.new")
    written.write_text(text)
    written.replace(path)


def _irregular(path: Path) -> OSError:
    return OSError(
        errno.EINVAL, "is no regular file, but a pipe, a folder, a socket or a device: remove it", str(path)
    )
