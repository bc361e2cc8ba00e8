"""Entry points of installed distributions, read straight from their folders.

importlib.metadata does the same in general, but importing it alone takes longer than `drivetrain --help` may; it
still answers where packages are not installed as plain folders.
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
    """One object that a distribution announces.

    Attributes:
        name: What it is announced as.
        value: Where it stands: "package.module:attribute".
        distribution: Who announces it.
    """

    name: str
    value: str
    distribution: str

    def load(self) -> object:
        """Import the object's module, and give the object."""
        module, _, path = self.value.partition(":")
        found: object = import_module(module)
        for attribute in filter(None, path.split(".")):
            found = getattr(found, attribute)
        return found


def entry_points(group: str) -> tuple[EntryPoint, ...]:
    """What the installed distributions announce in a group, sorted by name.

    Raises:
        ConfigError: Two distributions announce the same name.
    """
    return _entry_points(group, tuple(sys.path))


@cache
def _entry_points(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    # What a path holds is looked up once: it changes only with an installation, for which a process starts anew.
    texts = _texts(path) if _is_plain(path) else _texts_by_importlib(path)
    found = sorted(point for name, text in texts for point in _parse(name, text, group))
    for one, other in pairwise(found):
        if one.name == other.name:
            raise ConfigError(
                f"{group}: {one.name!r} is announced by {one.distribution} and by {other.distribution}; uninstall one"
            )
    return tuple(found)


def _is_plain(path: tuple[str, ...]) -> bool:
    """Whether distributions can only be folders: nothing is zipped, and no other finder knows of any."""
    others = [finder for finder in sys.meta_path if finder is not PathFinder]
    return not any(hasattr(finder, "find_distributions") for finder in others) and not any(
        map(os.path.isfile, path)
    )


def _texts(path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The distributions' names and their entry_points.txt; the first of a name on the path hides the others."""
    seen: set[str] = set()
    for folder in dict.fromkeys(path):
        try:
            entries = sorted(os.listdir(folder or "."))
        except OSError:
            continue  # a path may name what is not there
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
                continue  # most announce nothing


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
