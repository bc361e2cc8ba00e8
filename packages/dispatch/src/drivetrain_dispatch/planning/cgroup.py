"""What a memory limit of the process's control group leaves, as containers and batch systems set one. Linux alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ROOT = Path("/sys/fs/cgroup")
_PROCESS = Path("/proc/self/cgroup")


class _Files(NamedTuple):
    """What the files of a version are called, and the counts of file pages in `memory.stat`."""

    limit: str
    used: str
    of_files: tuple[str, str]


_SECOND = _Files("memory.max", "memory.current", ("active_file", "inactive_file"))
_FIRST = _Files(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")
)


def free_of_cgroup(*, root: Path = _ROOT, process: Path = _PROCESS) -> int | None:
    """What the process may still take in memory, of its control group and those around it; None without a limit.

    The cache of files counts as free: it is given back when memory is asked for.

    Args:
        root: Where the groups are mounted: version 2, or version 1 with its folder `memory`.
        process: Which groups are the process's.
    """
    found = [_free_of(folder, files) for folder, files in _groups(root, process)]
    return min((free for free in found if free is not None), default=None)


def _groups(root: Path, process: Path) -> Iterator[tuple[Path, _Files]]:
    """The folders of the groups; a container sees its own as the root, whatever its path is outside."""
    yield root, _SECOND
    yield root / "memory", _FIRST
    try:
        lines = process.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base, files = (root, _SECOND) if controllers == "" else (root / "memory", _FIRST)
        inner = Path(path.lstrip("/"))
        for group in [inner, *inner.parents]:
            yield base / group, files


def _free_of(folder: Path, files: _Files) -> int | None:
    """What one group leaves."""
    try:
        limit = (folder / files.limit).read_text().strip()
        used = int((folder / files.used).read_text())
    except OSError:
        return None  # no group, or the root of all, which has no limit
    if limit == "max":
        return None
    return max(0, int(limit) - used + _of_files(folder / "memory.stat", files))


def _of_files(stat: Path, files: _Files) -> int:
    try:
        lines = stat.read_text().splitlines()
    except OSError:
        return 0
    sizes = dict(line.split() for line in lines)
    return sum(int(sizes.get(name, 0)) for name in files.of_files)
