"""The memory left under the limit of the process's control group, which containers and batch systems set. Linux."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ROOT = Path("/sys/fs/cgroup")
_PROCESS = Path("/proc/self/cgroup")


class _Files(NamedTuple):
    """The file names of a cgroup version, and the keys of `memory.stat` that count file pages."""

    limit: str
    used: str
    of_files: tuple[str, str]


_SECOND = _Files("memory.max", "memory.current", ("active_file", "inactive_file"))
_FIRST = _Files(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")
)


def free_of_cgroup(*, root: Path = _ROOT, process: Path = _PROCESS) -> int | None:
    """Return the bytes that the process's control group and its parents still allow; None without a limit.

    The page cache counts as free, since the kernel reclaims it on demand.

    Args:
        root: The folder where the control groups are mounted: version 2, or version 1 with its folder `memory`.
        process: The file that lists the process's control groups.
    """
    found = [_free_of(folder, files) for folder, files in _groups(root, process)]
    return min((free for free in found if free is not None), default=None)


def _groups(root: Path, process: Path) -> Iterator[tuple[Path, _Files]]:
    """Yield the folders of the groups; a container sees its own group as the root, whatever its path outside."""
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
    """Return the bytes that one group still allows; None without a limit."""
    try:
        limit = (folder / files.limit).read_text().strip()
        used = int((folder / files.used).read_text())
    except OSError:
        return None  # no such group, or the root group, which has no limit
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
