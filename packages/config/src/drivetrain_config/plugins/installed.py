"""Read the entry points of installed distributions straight from their folders.

importlib.metadata does the same in general, but its import alone takes longer than `drivetrain --help` may. It serves
as the fallback where packages are not installed as plain folders.
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
    """An object that a distribution registers.

    Attributes:
        name: The name of the entry point.
        value: The location of the object, as "package.module:attribute".
        distribution: The name of the distribution.
    """

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
    """Return the entry points of a group over all installed distributions, sorted by name.

    Raises:
        ConfigError: Two distributions register the same name.
    """
    return _entry_points(group, tuple(sys.path))


@cache
def _entry_points(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    # Cached by path: entry points change only with an installation, which takes effect in a new process.
    texts = _texts(path) if _is_plain(path) else _texts_by_importlib(path)
    found = sorted(point for name, text in texts for point in _parse(name, text, group))
    for one, other in pairwise(found):
        if one.name == other.name:
            raise ConfigError(
                f"{group}: {one.name!r} is announced by {one.distribution} and by {other.distribution}; uninstall one"
            )
    return tuple(found)


def _is_plain(path: tuple[str, ...]) -> bool:
    """Return whether all distributions are folders: none is zipped, and no other finder provides any."""
    others = [finder for finder in sys.meta_path if finder is not PathFinder]
    return not any(hasattr(finder, "find_distributions") for finder in others) and not any(
        map(os.path.isfile, path)
    )


def _texts(path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield each distribution's name and entry_points.txt; the first of a name on the path hides the others."""
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


def _texts_by_importlib(path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    from importlib.metadata import distributions

    seen: set[str] = set()
    for distribution in distributions(path=list(path)):
        name = distribution.name.lower().replace("-", "_").replace(".", "_")
        if name not in seen:
            seen.add(name)
            yield name, distribution.read_text("entry_points.txt") or ""


def _parse(distribution: str, text: str, group: str) -> Iterator[EntryPoint]:
    if f"[{group}]" not in text:
        return
    current = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            current = line.strip("[]")
        elif current == group and "=" in line and not line.startswith(("#", ";")):
            name, _, value = line.partition("=")
            yield EntryPoint(name.strip(), value.partition("[")[0].strip(), distribution)
