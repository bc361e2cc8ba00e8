"""A control group of our own, with a limit of memory: where the machine lets one be made."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


@contextmanager
def limited_group(size_bytes: int) -> Generator[Path | None]:
    """A group below the root whose processes have so much memory; None where none can be made. Removed afterwards.

    What joins it must be over when the block ends.
    """
    first = _ROOT / "memory"
    base, limit = (first, "memory.limit_in_bytes") if first.exists() else (_ROOT, "memory.max")
    group = base / f"drivetrain-benchmark-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(size_bytes))
    except OSError:
        yield None
        return
    try:
        yield group
    finally:
        group.rmdir()


def join(group: Path) -> None:
    """Have this process belong to a group, before it takes memory."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
