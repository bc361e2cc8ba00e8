"""Open regular files, lock them, and replace them.

Reading a pipe in a file's place would wait, and a device may have no end. A lock lasts until its process unlocks it
or ends, even by a signal.
"""

import errno
import fcntl
import json
import logging
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_MOST_JSON_BYTES = 1 << 26


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file without waiting, following links, and return its descriptor.

    Raises:
        OSError: The path names a pipe, a folder, a socket or a device, or cannot be opened.
    """
    why = "is no regular file, but a pipe, a folder, a socket or a device: remove it"
    # A socket cannot be opened, and opening a device may do something.
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, why, str(path))
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, why, str(path))
    return file


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a regular file; return an empty one if the file is missing.

    Raises:
        OSError: See `open_regular`.
        ValueError: The file is not JSON, too long, or nested too deeply.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            text = file.read(_MOST_JSON_BYTES + 1)
    except FileNotFoundError:
        return {}
    if len(text) > _MOST_JSON_BYTES:
        raise ValueError(f"it holds more than {_MOST_JSON_BYTES} bytes")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def replace_text(path: Path, text: str) -> None:
    """Write a file by a rename: a killed process leaves the old content or the new one."""
    written = path.with_name(f"{path.name}.new")
    written.write_text(text)
    written.replace(path)


def open_alone(path: Path, *, taken: Exception) -> int:
    """Open or create a file, and lock it. Raise `taken` if it is locked; warn if locks do not exist here."""
    file = open_regular(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise taken from None
    except OSError as error:
        logger.warning("%s has no locks (%s): a second process that writes there is not noticed", path, error)
    return file


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a file, which must exist."""
    file = open_regular(path)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(file)
    return False


def unlock(file: int) -> None:
    """Release the lock also for forked children that have not closed their copy of the file yet."""
    with suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_UN)
