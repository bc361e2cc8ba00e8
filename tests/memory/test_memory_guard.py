import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch import nn

from drivetrain_memory import LeakDetector, MemoryGuard, memory_breakdown
from limited_group import limited_group

MB = 2**20
LIMIT = 1000 * MB


class Group:
    """A file tree in the form of a control group of version 2, with a limit of 1000 MB."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.root = folder / "proc", folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "self" / "cgroup").write_text("0::/job\n")
        (self.root / "job").mkdir(parents=True)
        (self.root / "job" / "memory.max").write_text(str(LIMIT))
        self.hold(0, 0)

    def hold(self, held: int, cache: int) -> None:
        stat = (
            f"active_file {cache * MB}\ninactive_file 0\nfile_dirty 0\nfile_writeback 0\nslab_reclaimable 0\n"
        )
        (self.root / "job" / "memory.stat").write_text(stat)
        (self.root / "job" / "memory.current").write_text(str((held + cache) * MB))

    def guard(self, **settings: object) -> MemoryGuard:
        return MemoryGuard(cgroup_root=self.root, proc=self.proc, **settings)  # pyright: ignore[reportArgumentType]


@pytest.fixture
def group(tmp_path: Path) -> Group:
    return Group(tmp_path)


@pytest.mark.parametrize(
    ("held", "cache", "warns", "stops"),
    [
        (100, 0, False, False),
        (100, 890, False, False),
        (899, 101, False, False),
        (900, 0, True, False),
        (900, 100, True, False),
        (949, 0, True, False),
        (950, 50, True, True),
    ],
)
def test_only_what_the_kernel_cannot_drop_counts(
    group: Group, caplog: pytest.LogCaptureFixture, held: int, cache: int, warns: bool, stops: bool
) -> None:
    guard = group.guard(stop_at=0.95)
    group.hold(held, cache)
    with caplog.at_level(logging.WARNING):
        guard.check()
    assert (bool(caplog.records), guard.should_stop) == (warns, stops)
    assert guard.limit_bytes == LIMIT


def test_the_warning_says_what_holds_memory(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(10, 10))
    group.hold(920, 60)
    with caplog.at_level(logging.WARNING):
        group.guard(describe=lambda: memory_breakdown(model)).check()
    (record,) = caplog.records
    for text in ("92% of this job's memory limit", "964.69 MB of 1.05 GB", "page cache beside it: 62.91 MB"):
        assert text in record.message
    assert "parameters 4.00 MB" in record.message
    assert "largest modules: 0 4.00 MB, 1 440 B" in record.message


def test_it_warns_once_until_memory_has_fallen(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    guard = group.guard()
    with caplog.at_level(logging.WARNING):
        for held in (910, 930, 880, 910, 840, 910):
            group.hold(held, 0)
            guard.check()
    assert len(caplog.records) == 2
    assert not guard.should_stop  # nobody asked for it


def test_the_warning_comes_also_where_describing_fails(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("dictionary changed size during iteration")

    guard = group.guard(describe=fail, stop_at=0.95)
    group.hold(960, 0)
    with caplog.at_level(logging.WARNING):
        guard.check()
    assert guard.should_stop
    assert "what holds memory could not be described" in caplog.messages[0]
    assert "96% of this job's memory limit" in caplog.messages[1]


def test_it_calls_back_once_with_the_reason(group: Group) -> None:
    told: list[str] = []
    guard = group.guard(stop_at=0.95, on_stop=told.append)
    for held in (940, 960, 990, 900, 970):
        group.hold(held, 0)
        guard.check()
    assert told == ["96% of this job's memory limit is held"]
    with pytest.raises(ValueError, match="on_stop without stop_at: say at which part of the limit"):
        group.guard(on_stop=told.append)


def test_its_thread_raises_the_flag(group: Group) -> None:
    with group.guard(stop_at=0.9, interval_seconds=0.005) as guard:
        assert not guard.should_stop
        group.hold(990, 0)
        for _ in range(2000):
            if guard.should_stop:
                break
            time.sleep(0.01)
    assert guard.should_stop


def test_without_a_limit_it_does_nothing(tmp_path: Path) -> None:
    with MemoryGuard(cgroup_root=tmp_path, proc=tmp_path, stop_at=0.95) as guard:
        assert guard.check() is None
    assert (guard.limit_bytes, guard.should_stop) == (None, False)


def test_thresholds_are_parts_of_the_limit_and_functions_are_functions() -> None:
    with pytest.raises(ValueError, match="stop_at=95: give a part of the limit above 0 and at most 1"):
        MemoryGuard(stop_at=95)
    with pytest.raises(ValueError, match="interval_seconds=0: must be above 0"):
        MemoryGuard(interval_seconds=0)
    with pytest.raises(TypeError, match="on_stop='save': give a function"):
        MemoryGuard(stop_at=0.9, on_stop="save")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="on_leak='print': give a function of a report, such as print"):
        LeakDetector(on_leak="print")  # type: ignore[arg-type]


GUARDED = """
import logging, mmap, os, sys, time
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from drivetrain_memory import MemoryGuard
logging.basicConfig(format="%(message)s")
flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
with MemoryGuard(stop_at=0.92, interval_seconds=0.02) as guard, open(sys.argv[2], "wb") as file:
    for _ in range(60):
        file.write(bytes(10 * 2**20))  # page cache past the limit, which the kernel drops
        os.fsync(file.fileno())
    time.sleep(0.2)
    print("cache", guard.should_stop, flush=True)
    held = []
    while not guard.should_stop and len(held) < 100:
        held.append(mmap.mmap(-1, 5 * 2**20, flags=flags))
        time.sleep(0.2 * (len(held) > 55))  # near the threshold the guard has the time for ten looks
print("stopped", guard.should_stop, 60 < len(held) < 80)
"""


def test_a_real_limit_stops_the_loop_and_the_kernel_kills_nobody(tmp_path: Path) -> None:
    with limited_group(400 * MB) as group:
        done = subprocess.run(
            [sys.executable, "-c", GUARDED, str(group), str(tmp_path / "file")],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ},
        )
    assert done.stdout.splitlines() == ["cache False", "stopped True True"], done.stderr
    assert done.returncode == 0
    assert done.stderr.count("of this job's memory limit is held") == 1
