"""A control group of this machine with a limit of memory, for tests that come near one."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from drivetrain_memory.usage.memory_cgroup import CGROUP_ROOT


@contextmanager
def limited_group(limit_bytes: int) -> Iterator[Path]:
    """A new group; a process joins it by writing its id to `cgroup.procs`. Skips where nobody may make one."""
    name = f"drivetrain-test-{uuid.uuid4().hex[:8]}"
    is_first = (CGROUP_ROOT / "memory").is_dir()
    folder = CGROUP_ROOT / "memory" / name if is_first else CGROUP_ROOT / name
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"this machine lets nobody make a control group: {error}")
    try:
        try:
            (folder / ("memory.limit_in_bytes" if is_first else "memory.max")).write_text(str(limit_bytes))
        except OSError as error:
            pytest.skip(f"this machine lets nobody limit a control group: {error}")
        yield folder
    finally:
        folder.rmdir()
