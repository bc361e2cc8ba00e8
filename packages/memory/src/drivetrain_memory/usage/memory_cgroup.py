"""The memory of this job's control group and its limit, versions 2 and 1.

The kernel counts the page cache of the files that a group reads and writes as the group's memory, and drops it when
memory is needed. Only the rest can make the kernel end a process:

    held = current - droppable
    droppable = active_file + inactive_file - dirty - writeback + slab_reclaimable

`active_file` and `inactive_file` are the page cache without shared memory: tmpfs counts as anonymous memory. `dirty`
and `writeback` are the pages of that cache to be written before the kernel can drop them. Version 1 does not report
the reclaimable slab, so there the slab counts as held.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from drivetrain_memory.usage.processes import PROC

CGROUP_ROOT = Path("/sys/fs/cgroup")
# Version 1 writes "no limit" as the largest multiple of a page; no machine has as much.
_NO_LIMIT = 2**60


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupFiles:
    """The files of one memory control group."""

    folder: Path
    version: int
    limit_bytes: int | None

    @property
    def current_file(self) -> Path:
        """The file with the group's current memory."""
        return self.folder / ("memory.current" if self.version == 2 else "memory.usage_in_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupUsage:
    """The memory of a control group now."""

    current_bytes: int
    cache_bytes: int  # the page cache: files that were read or written, without shared memory
    droppable_bytes: int  # dropped by the kernel when memory is needed
    limit_bytes: int | None

    @property
    def held_bytes(self) -> int:
        """The memory that the kernel cannot drop, in bytes."""
        return max(0, self.current_bytes - self.droppable_bytes)

    @property
    def left_bytes(self) -> int | None:
        """The memory that the group may still take, in bytes; None without a limit."""
        return None if self.limit_bytes is None else max(0, self.limit_bytes - self.held_bytes)

    @property
    def held_fraction(self) -> float:
        """The part of the limit that is held; 0 without a limit."""
        return self.held_bytes / self.limit_bytes if self.limit_bytes else 0.0


def find_cgroups(
    pid: int | str = "self", *, root: Path = CGROUP_ROOT, proc: Path = PROC
) -> tuple[CgroupFiles, ...]:
    """Return the control group of a process, and the groups around it, as far as they limit memory.

    Every group's limit can end the process, as it covers all groups inside. A group that reports no memory, such as
    the root of version 2, is left out.
    """
    found: list[CgroupFiles] = []
    for version, folders in cgroup_folders("memory", pid, root=root, proc=proc):
        for level, folder in enumerate(folders):
            group = CgroupFiles(folder=folder, version=version, limit_bytes=_limit(folder, version))
            if group.current_file.exists() and (level == 0 or group.limit_bytes is not None):
                found.append(group)
    return tuple(found)


def cgroup_folders(
    controller: str, pid: int | str = "self", *, root: Path = CGROUP_ROOT, proc: Path = PROC
) -> Iterator[tuple[int, tuple[Path, ...]]]:
    """Yield version and folders, innermost first, of each hierarchy in which a controller may limit a process."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:  # not Linux, or the process is gone
        return
    for line in lines:  # such as 0::/user.slice
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            # Where both versions are mounted, version 2 is in a folder of its own.
            yield 2, _upwards(root / "unified" if (root / "unified").is_dir() else root, path)
        elif controller in controllers.split(","):
            yield 1, _upwards(root / controller, path)


def nearest_limit(*, root: Path = CGROUP_ROOT, proc: Path = PROC) -> CgroupUsage | None:
    """Return the usage of this process's group with the least memory left below a limit; None without a limit."""
    limited = (group for group in find_cgroups(root=root, proc=proc) if group.limit_bytes is not None)
    usages = [usage for group in limited if (usage := read_cgroup(group)) is not None]
    return min(usages, key=lambda usage: usage.left_bytes or 0, default=None)


def count_memory_kills(*, root: Path = CGROUP_ROOT, proc: Path = PROC) -> int | None:
    """Count the processes that the kernel killed for lack of memory; None if it does not tell.

    The count grows if the kernel kills one on this host (Linux 4.13 and later), or in this process's group if a
    container hides the host's. It may count one process twice.
    """
    groups = [
        folder for _, folders in cgroup_folders("memory", root=root, proc=proc) for folder in folders[:1]
    ]
    names = ("memory.events", "memory.oom_control")
    counts: list[int] = []
    for file in (proc / "vmstat", *(group / name for group in groups for name in names)):
        with suppress(OSError):
            lines = file.read_text().splitlines()
            counts += [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
    return sum(counts) if counts else None


def read_cgroup(group: CgroupFiles) -> CgroupUsage | None:
    """Read a group's usage, in 50 us or more, as the kernel sums statistics up; None if the group is gone."""
    try:
        current = int(group.current_file.read_bytes())
        return parse_usage(current, (group.folder / "memory.stat").read_text(), group)
    except OSError:
        return None


def parse_usage(current_bytes: int, stat: str, group: CgroupFiles) -> CgroupUsage:
    """Return the memory of a group from the text of its files."""
    counts = {name: int(count) for name, count in map(str.split, stat.splitlines())}
    # Of version 1, the names with "total_" count the groups within too, as the limit does.
    of_cache, of_unwritten = ("", "file_") if group.version == 2 else ("total_", "total_")
    cache = counts.get(f"{of_cache}active_file", 0) + counts.get(f"{of_cache}inactive_file", 0)
    unwritten = counts.get(f"{of_unwritten}dirty", 0) + counts.get(f"{of_unwritten}writeback", 0)
    slab = counts.get("slab_reclaimable", 0)  # of version 2 alone
    return CgroupUsage(
        current_bytes=current_bytes,
        cache_bytes=cache,
        droppable_bytes=min(current_bytes, max(0, cache - unwritten) + slab),
        limit_bytes=group.limit_bytes,
    )


def _upwards(mount: Path, path: str) -> tuple[Path, ...]:
    """Return the folders of a group and of the groups around it, up to the mount.

    In a container the mount is often the group itself, and the path is the host's, which does not exist here.
    """
    inner = PurePosixPath(path.lstrip("/"))
    if ".." in inner.parts or not (mount / inner).is_dir():
        inner = PurePosixPath()
    return tuple(mount / part for part in (inner, *inner.parents)) if inner.parts else (mount,)


def _limit(folder: Path, version: int) -> int | None:
    try:
        text = (folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() and int(text) < _NO_LIMIT else None
