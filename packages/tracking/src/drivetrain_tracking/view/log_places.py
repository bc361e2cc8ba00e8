"""Find the logs of runs in folders."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from drivetrain_tracking.spool.line import LOG_NAME

_MAX_DEPTH = 4  # folders below a given one: a sweep of groups of runs, not the files of a checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPlace:
    """The place of a run's log.

    Attributes:
        label: A short name, unique among the places of one search: the folder's path below the one that was given.
        path: The absolute path of the log.
    """

    label: str
    path: Path


def find_logs(folders: Sequence[Path]) -> tuple[LogPlace, ...]:
    """Find the logs in folders and up to four levels below them, sorted by label. Links are not followed.

    A folder that does not exist holds none. Each log is returned once, even if several folders hold it.
    """
    found: dict[Path, str] = {}
    for folder in folders:
        root = folder.absolute()
        for inside in _folders_of(root):
            label = str(inside.relative_to(root)) if inside != root else root.name or str(root)
            found.setdefault(inside / LOG_NAME, label)
    labels = list(found.values())
    places = [
        LogPlace(label=label if labels.count(label) == 1 else str(path.parent), path=path)
        for path, label in found.items()
    ]
    return tuple(sorted(places, key=lambda place: (place.label, place.path)))


def _folders_of(root: Path) -> Iterator[Path]:
    """Yield the folders that hold a log, from the root down."""
    for inside, folders, files in os.walk(root):
        if LOG_NAME in files:
            yield Path(inside)
        depth = len(Path(inside).relative_to(root).parts)
        # Assigning to the list tells os.walk where to go on.
        folders[:] = (
            sorted(name for name in folders if not name.startswith(".")) if depth < _MAX_DEPTH else []
        )
