"""The limits that a container or a scheduler sets by Linux control groups, of both versions."""

from dataclasses import dataclass
from pathlib import Path

from drivetrain_memory.usage.memory_cgroup import CGROUP_ROOT, cgroup_folders, nearest_limit
from drivetrain_memory.usage.processes import PROC


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    """The tightest limits over this process's control groups; None without a limit.

    `cpus` is CPU time as a number of cores; `used_bytes` leaves out memory that the kernel can reclaim; `pids` counts
    processes and threads.
    """

    cpus: float | None = None
    memory_bytes: int | None = None
    used_bytes: int = 0
    pids: int | None = None
    used_pids: int = 0


def read_group_limits(root: Path = CGROUP_ROOT, proc: Path = PROC) -> GroupLimits:
    """Read the limits of the groups of this process and of all groups around them."""

    def folders(controller: str) -> list[Path]:
        found = cgroup_folders(controller, root=root, proc=proc)
        return [folder for _, hierarchy in found for folder in hierarchy]

    def quota(folder: Path) -> float | None:
        try:
            used, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):
            used, period = (str(_number(folder / f"cpu.cfs_{what}_us")) for what in ("quota", "period"))
        if not used.isdecimal() or not period.isdecimal() or int(used) == 0:
            return None
        return int(used) / int(period)

    memory = nearest_limit(root=root, proc=proc)
    of_pids = [(most, folder) for folder in folders("pids") if (most := _number(folder / "pids.max"))]
    pids = min(of_pids, default=None)
    return GroupLimits(
        cpus=min((cpus for folder in folders("cpu") if (cpus := quota(folder)) is not None), default=None),
        memory_bytes=None if memory is None else memory.limit_bytes,
        used_bytes=0 if memory is None else memory.held_bytes,
        pids=None if pids is None else pids[0],
        used_pids=0 if pids is None else _number(pids[1] / "pids.current") or 0,
    )


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
