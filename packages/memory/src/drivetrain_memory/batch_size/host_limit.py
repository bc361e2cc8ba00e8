"""The limit of the host's memory: allocations beyond it fail, before the kernel ends the process."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from drivetrain_memory.usage.memory_cgroup import CGROUP_ROOT, nearest_limit
from drivetrain_memory.usage.processes import PROC

_STATUS = Path("/proc/self/status")


def available_host_bytes(*, cgroup_root: Path = CGROUP_ROOT, proc: Path = PROC) -> int | None:
    """Return the bytes that this process's job may still allocate on the host; None without a limit.

    The job's control group and each group around it may have a limit; the limit with the least memory left counts.
    Memory that the kernel can drop, such as the page cache, does not count as used.
    """
    nearest = nearest_limit(root=cgroup_root, proc=proc)
    return None if nearest is None else nearest.left_bytes


@contextmanager
def limit_host_memory(available_bytes: int | None) -> Generator[None]:
    """Limit the block's new allocations on the host to `available_bytes`; None sets no limit.

    An allocation beyond it raises MemoryError, or torch's RuntimeError about the CPU allocator, where the kernel's
    out-of-memory killer would otherwise end the process when it writes to the memory. Reserved private memory counts
    even before it is written to. Each process that starts in the block inherits the limit for its own memory. Only
    Linux sets the limit.
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
