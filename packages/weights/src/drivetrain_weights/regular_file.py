"""Open regular files only, and read JSON of bounded size and depth from them.

Opening a named pipe would wait until another process writes to the pipe, and reading a device may never end.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

from drivetrain_weights.errors import WeightFilesError

MOST_JSON_BYTES = 1 << 28  # an index of a million tensors has a third of it
_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: Path) -> int:
    """Open a regular file for reading, and return its descriptor. Links are followed; a named pipe never blocks."""
    # Opening a device may do something, and a socket cannot be opened.
    _check_mode(path, os.stat(path).st_mode)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    try:
        _check_mode(path, os.fstat(file).st_mode)  # what is there now is what is read
    except WeightFilesError:
        os.close(file)
        raise
    return file


def check_regular(path: Path) -> None:
    """Check that a path names a regular file, for libraries that open files by themselves."""
    os.close(open_regular(path))


def read_json(path: Path) -> Any:
    """Read a regular file of JSON, as `parse_json` does."""
    with os.fdopen(open_regular(path), "rb") as file:
        return parse_json(file.read(MOST_JSON_BYTES + 1), where=str(path))


def parse_json(text: bytes | str, *, where: str) -> Any:
    """Parse JSON; raise WeightFilesError, with `where` in its text, for a repeated key or damaged JSON."""
    if len(text) > MOST_JSON_BYTES:
        raise WeightFilesError(f"{where} holds more than {MOST_JSON_BYTES} bytes of JSON: it is damaged")
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except RecursionError:
        raise WeightFilesError(f"{where} is nested too deeply to be read: it is damaged") from None
    except KeyError as error:
        raise WeightFilesError(
            f"{where} has the key {error.args[0]!r} twice in one object, so that its value is not defined; fetch or "
            "write the file again"
        ) from None
    except ValueError as error:
        raise WeightFilesError(f"{where} is no JSON: {error}") from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise KeyError(next(name for name in names if names.count(name) > 1))
    return found


def _check_mode(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
        raise WeightFilesError(f"{path} is no regular file but {kind}: name a file, or put one there")
