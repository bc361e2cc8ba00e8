"""The limit of the host's memory: allocations beyond it fail, before the kernel ends the process."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_STATUS = Path("/proc/self/status")
_NO_LIMIT = 1 << 60  # version 1 writes a number near 2**63 where there is none


def job_memory(membership: str, root: Path = _ROOT) -> tuple[int, int] | None:
    """Return the limit of a job's memory and what it uses, in bytes, as its control group says.

    Pages of files, which the kernel drops when memory is short, do not count as used.

    Args:
        membership: The text of /proc/PID/cgroup.
        root: The folder where control groups are mounted.

    Returns:
        The smallest limit of the group and those around it, with that group's use; None where there is no limit.
    """
    found: list[tuple[int, int]] = []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        is_first = controllers == "memory"
        if not is_first and controllers:
            continue
        names = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes")
            if is_first
            else ("memory.max", "memory.current")
        )
        base = root / "memory" if is_first else root
        group = base / path.lstrip("/")
        for folder in [group, *group.parents]:
            if folder.is_relative_to(base) and (limit := _number(folder / names[0])) is not None:
                used = (_number(folder / names[1]) or 0) - _droppable(folder / "memory.stat")
                found.append((limit, max(0, used)))
    return min(found, key=lambda one: one[0] - one[1], default=None)


def _number(file: Path) -> int | None:
    if not file.exists():
        return None
    text = file.read_text().strip()
    return int(text) if text.isdecimal() and int(text) < _NO_LIMIT else None


def _droppable(file: Path) -> int:
    if not file.exists():
        return 0
    rows = dict(line.split() for line in file.read_text().splitlines())
    return int(rows.get("total_inactive_file", rows.get("inactive_file", 0)))


def available_host_bytes() -> int | None:
    """Return what this process's job may still allocate on the host, in bytes; None where nothing limits it."""
    membership = Path("/proc/self/cgroup")
    found = job_memory(membership.read_text()) if membership.exists() else None
    return None if found is None else max(0, found[0] - found[1])


@contextmanager
def limit_host_memory(available_bytes: int | None) -> Generator[None]:
    """Let allocations on the host fail in the block once this process takes that much more than now.

    An allocation beyond it raises MemoryError, or torch's RuntimeError about the CPU allocator, where the kernel's
    out-of-memory killer would otherwise end the process when it writes to the memory. Private memory is counted that
    is reserved, written to or not. Processes that start in the block inherit the limit, each for itself. Only Linux
    has it; elsewhere the block runs without.

    Args:
        available_bytes: The bytes that the block may allocate; None sets no limit.
    """
    if available_bytes is None or sys.platform != "linux":
        yield
        return
    import resource

    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    rows = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    limit = int(rows["VmData"].split()[0]) * 1024 + available_bytes
    for other in (before, hard):
        limit = limit if other == resource.RLIM_INFINITY else min(limit, other)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))
