"""Cache measured rates across processes in a JSON file in the user's cache folder."""

import json
import logging
import math
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from drivetrain_weights.regular_file import read_json

_LOG = logging.getLogger(__name__)
# The cache folder of each platform, relative to the home folder.
_FOLDERS = {"darwin": Path("Library/Caches"), "win32": Path("AppData/Local")}


def default_cache() -> Path:
    """Return the default file that caches measured rates."""
    return Path.home() / _FOLDERS.get(sys.platform, Path(".cache")) / "drivetrain" / "rates.json"


def remembered(
    cache: Path, what: Sequence[str], names: Sequence[str], measure: Callable[[], Sequence[float]]
) -> list[float]:
    """Return cached numbers, or measure and cache them.

    A damaged file counts as missing and is replaced atomically. If the file cannot be written, each call measures
    again.

    Args:
        cache: The file that caches the numbers.
        what: The key of the numbers, such as a machine, a device and a version.
        names: The names of the numbers.
        measure: A function that returns the numbers in the order of `names`.
    """
    key = json.dumps(list(what))
    known = _read(cache).get(key, {})
    if all(name in known for name in names):
        return [known[name] for name in names]
    found = dict(zip(names, measure(), strict=True))
    # Read again: another process may have written during the measurement.
    _write(cache, {**_read(cache), key: found})
    return list(found.values())


def _read(cache: Path) -> dict[str, dict[str, float]]:
    """Return the valid entries of the file; none if it is missing or damaged."""
    try:
        said: object = read_json(cache)
    except (OSError, ValueError):
        return {}
    if not isinstance(said, Mapping):
        return {}
    return {
        key: dict(numbers)
        for key, numbers in said.items()
        if isinstance(numbers, Mapping) and all(map(_is_number, numbers.values()))
    }


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0  # type: ignore[arg-type]


def _write(cache: Path, numbers: Mapping[str, Mapping[str, float]]) -> None:
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=cache.parent, prefix=f".{cache.name}.", delete=False
        ) as file:
            file.write(json.dumps(numbers, indent=1))
        try:
            os.replace(file.name, cache)
        except OSError:
            os.unlink(file.name)
            raise
    except OSError as error:
        _LOG.info("measured rates are not kept: %s", error)
