"""The limits that a container or a scheduler sets by Linux control groups, of both versions."""

from dataclasses import dataclass
from pathlib import Path

# What version 1 writes for "no limit" in the number of bytes.
_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    """The tightest limits over this process's control groups; None where there is none.

    Attributes:
        cpus: The number of cores' time that the group may use.
        memory_bytes: The memory that the group may use.
        used_bytes: The memory that it uses.
        pids: The number of processes and threads that it may have.
        used_pids: The number that it has.
    """

    cpus: float | None = None
    memory_bytes: int | None = None
    used_bytes: int = 0
    pids: int | None = None
    used_pids: int = 0


def read_group_limits(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc/self")) -> GroupLimits:
    """Read the limits of the groups of this process and of all groups around them."""
    folders = _folders(root, proc / "cgroup")
    memory = _tightest(folders, ("memory.max", "memory.limit_in_bytes"), below=_UNLIMITED_BYTES)
    pids = _tightest(folders, ("pids.max",), below=_UNLIMITED_BYTES)
    return GroupLimits(
        cpus=min((quota for folder in folders if (quota := _quota(folder)) is not None), default=None),
        memory_bytes=None if memory is None else memory[0],
        used_bytes=0
        if memory is None
        else (_number(memory[1] / "memory.current") or _number(memory[1] / "memory.usage_in_bytes") or 0),
        pids=None if pids is None else pids[0],
        used_pids=0 if pids is None else _number(pids[1] / "pids.current") or 0,
    )


def _folders(root: Path, file: Path) -> list[Path]:
    """Return the folders of this process's groups, innermost first, of every hierarchy that is mounted."""
    found: dict[Path, None] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        _, controllers, inside = line.split(":", 2)
        # A container often sees its own group as the root, whatever the path says.
        for base in (root, *(root / name for name in controllers.split(",") if name)):
            folder = base / inside.lstrip("/")
            for each in (folder, *folder.parents):
                if each.is_relative_to(base) and each.is_dir():
                    found[each] = None
    return list(found)


def _tightest(folders: list[Path], names: tuple[str, ...], *, below: int) -> tuple[int, Path] | None:
    limits = [(limit, folder) for folder in folders for name in names if (limit := _number(folder / name))]
    return min((each for each in limits if each[0] < below), default=None)


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _quota(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        quota, period = str(_number(folder / "cpu.cfs_quota_us")), str(_number(folder / "cpu.cfs_period_us"))
    if not quota.isdecimal() or not period.isdecimal() or int(quota) == 0:
        return None
    return int(quota) / int(period)
