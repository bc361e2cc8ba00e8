"""Read the entry points of installed distributions straight from their folders.

importlib.metadata does the same, but its import alone takes longer than `drivetrain --help` may take. It is the
fallback if packages are not installed as plain folders.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from itertools import pairwise

from drivetrain_config.errors import ConfigError


@dataclass(frozen=True, slots=True, order=True)
class EntryPoint:
    """An object that a distribution registers; its value is its location, as "package.module:attribute"."""

    name: str
    value: str
    distribution: str

    def load(self) -> object:
        """Import the object's module and return the object."""
        module, _, path = self.value.partition(":")
        found: object = import_module(module)
        for attribute in filter(None, path.split(".")):
            found = getattr(found, attribute)
        return found


def entry_points(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group, sorted by name; ConfigError if two have the same name."""
    return _entry_points(group, tuple(sys.path))


@cache
def _entry_points(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    # Cached by path: entry points change only with an installation, which takes effect in a new process.
    others = [finder for finder in sys.meta_path if finder is not PathFinder]
    is_zipped = any(map(os.path.isfile, path))
    if is_zipped or any(hasattr(finder, "find_distributions") for finder in others):
        from importlib.metadata import distributions

        texts: dict[str, str] = {}
        for each in distributions(path=list(path)):
            name = each.name.lower().replace("-", "_").replace(".", "_")
            texts.setdefault(name, each.read_text("entry_points.txt") or "")
    else:
        texts = dict(_read_texts(path))
    found: list[EntryPoint] = []
    for distribution, text in texts.items():
        current = ""
        for line in map(str.strip, text.splitlines() if f"[{group}]" in text else ()):
            if line.startswith("["):
                current = line.strip("[]")
            elif current == group and "=" in line and not line.startswith(("#", ";")):
                name, _, value = line.partition("=")
                found.append(EntryPoint(name.strip(), value.partition("[")[0].strip(), distribution))
    found.sort()
    for one, other in pairwise(found):
        if one.name == other.name:
            raise ConfigError(
                f"{group}: {one.name!r} is announced by {one.distribution} and by {other.distribution}; uninstall one"
            )
    return tuple(found)


def _read_texts(path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield each distribution's name and entry_points.txt; of equal names, only the first on the path."""
    seen: set[str] = set()
    for folder in dict.fromkeys(path):
        try:
            entries = sorted(os.listdir(folder or "."))
        except OSError:
            continue  # sys.path may hold folders that do not exist
        for entry in entries:
            stem, extension = os.path.splitext(entry)
            name = stem.partition("-")[0].lower().replace(".", "_")
            if extension not in (".dist-info", ".egg-info") or name in seen:
                continue
            seen.add(name)
            try:
                with open(os.path.join(folder, entry, "entry_points.txt"), encoding="utf-8") as file:
                    yield name, file.read()
            except OSError:
                continue  # most distributions have no entry points
