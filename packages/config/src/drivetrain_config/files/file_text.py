"""Read regular files, and JSON of bounded depth. Other files are refused, since a pipe or device may never end."""

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drivetrain_config.errors import ConfigError
from drivetrain_config.values.kinds import MOST_LEVELS, check_depth


def read_text(path: Path) -> str:
    """Read a regular file of UTF-8, following links, without waiting.

    Raises:
        FileNotFoundError: The path does not exist.
        OSError: The path names a pipe, a folder, a socket or a device, or cannot be read.
        UnicodeDecodeError: The file is not UTF-8.
    """
    # A socket cannot be opened, and opening a device may do something.
    _check_mode(path, os.stat(path).st_mode)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    with open(file, encoding="utf-8-sig") as opened:
        _check_mode(path, os.fstat(file).st_mode)  # what is there now is what is read
        return opened.read()


def parse_json(
    path: Path, text: str, *, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] = dict
) -> Any:
    """Parse the JSON of a file; ConfigError if it is nested too deeply, ValueError if it is not JSON."""
    try:
        return check_depth(json.loads(text, object_pairs_hook=object_pairs_hook))
    except RecursionError:
        raise too_deep(path) from None


def too_deep(path: Path) -> ConfigError:
    """Return the error for a file that is nested too deeply."""
    return ConfigError(f"{path}: is nested too deeply: it may have {MOST_LEVELS} levels at most")


def _check_mode(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(
            errno.EINVAL, "is no regular file, but a pipe, a folder, a socket or a device", str(path)
        )
