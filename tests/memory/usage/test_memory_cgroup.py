from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_memory.usage.memory_cgroup import (
    CgroupFiles,
    count_memory_kills,
    find_cgroups,
    parse_usage,
    read_cgroup,
)

MB = 2**20
STAT_2 = """anon {anon}
file {cache}
active_file {active}
inactive_file {inactive}
file_dirty {dirty}
file_writeback {writeback}
slab_reclaimable {slab}
shmem 0
"""
STAT_1 = """cache 1
active_file 1
inactive_file 1
total_active_file {active}
total_inactive_file {inactive}
total_dirty {dirty}
total_writeback {writeback}
"""
sizes = st.integers(0, 2**40)


def tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@given(active=sizes, inactive=sizes, dirty=sizes, writeback=sizes, slab=sizes, anon=sizes)
@pytest.mark.parametrize("version", [1, 2])
def test_held_memory_is_all_but_what_the_kernel_can_drop(
    version: int, active: int, inactive: int, dirty: int, writeback: int, slab: int, anon: int
) -> None:
    group = CgroupFiles(folder=Path(), version=version, limit_bytes=2**42)
    current = anon + active + inactive + slab
    stat = (STAT_2 if version == 2 else STAT_1).format(
        anon=anon,
        cache=active + inactive,
        active=active,
        inactive=inactive,
        dirty=dirty,
        writeback=writeback,
        slab=slab,
    )
    usage = parse_usage(current, stat, group)
    clean = max(0, active + inactive - dirty - writeback)
    assert usage.cache_bytes == active + inactive
    assert usage.held_bytes == current - clean - (slab if version == 2 else 0)
    assert 0 <= usage.held_bytes <= current
    assert usage.held_fraction == usage.held_bytes / 2**42


def test_version_2_finds_its_group_and_the_limits_around_it(tmp_path: Path) -> None:
    stat = STAT_2.format(anon=0, cache=9 * MB, active=4 * MB, inactive=5 * MB, dirty=MB, writeback=0, slab=0)
    tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/outer/inner/job\n",
            "cgroup/outer/memory.current": "1",
            "cgroup/outer/memory.max": str(64 * MB),
            "cgroup/outer/inner/memory.current": "1",
            "cgroup/outer/inner/memory.max": "max\n",
            "cgroup/outer/inner/job/memory.current": str(20 * MB),
            "cgroup/outer/inner/job/memory.max": "max\n",
            "cgroup/outer/inner/job/memory.stat": stat,
        },
    )
    own, outer = find_cgroups(root=tmp_path / "cgroup", proc=tmp_path / "proc")
    assert (own.folder.name, own.limit_bytes) == ("job", None)
    assert (outer.folder.name, outer.limit_bytes) == ("outer", 64 * MB)
    usage = read_cgroup(own)
    assert usage is not None
    assert (usage.current_bytes, usage.held_bytes, usage.held_fraction) == (20 * MB, 12 * MB, 0.0)


def test_version_1_beside_an_empty_version_2_is_read(tmp_path: Path) -> None:
    tree(
        tmp_path,
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/job\n0::/\n",
            "cgroup/unified/cgroup.procs": "",
            "cgroup/memory/job/memory.usage_in_bytes": str(20 * MB),
            "cgroup/memory/job/memory.limit_in_bytes": str(40 * MB),
            "cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "cgroup/memory/memory.usage_in_bytes": str(90 * MB),
        },
    )
    (own,) = find_cgroups(root=tmp_path / "cgroup", proc=tmp_path / "proc")
    assert (own.version, own.limit_bytes) == (1, 40 * MB)


def test_in_a_container_the_mount_is_the_group(tmp_path: Path) -> None:
    tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../../seen/from/outside\n",
            "cgroup/memory.current": "1",
            "cgroup/memory.max": "1000",
        },
    )
    (own,) = find_cgroups(root=tmp_path / "cgroup", proc=tmp_path / "proc")
    assert (own.folder, own.limit_bytes) == (tmp_path / "cgroup", 1000)


@pytest.mark.parametrize(
    "files",
    [
        {"proc/vmstat": "oom_kill {}\n"},
        {
            "proc/self/cgroup": "0::/job\n",
            "cgroup/job/memory.events": "oom 9\noom_kill {}\noom_group_kill 0\n",
        },
        {
            "proc/self/cgroup": "4:memory:/job\n",
            "cgroup/memory/job/memory.oom_control": "oom_kill_disable 0\noom_kill {}\n",
        },
    ],
    ids=["host", "version 2", "version 1"],
)
def test_kills_for_lack_of_memory_are_counted(tmp_path: Path, files: dict[str, str]) -> None:
    for count in (3, 4):
        tree(tmp_path, {name: text.format(count) for name, text in files.items()})
        assert count_memory_kills(root=tmp_path / "cgroup", proc=tmp_path / "proc") == count


def test_a_system_without_groups_and_a_group_that_is_gone_give_nothing(tmp_path: Path) -> None:
    assert find_cgroups(root=tmp_path, proc=tmp_path) == ()
    assert count_memory_kills(root=tmp_path, proc=tmp_path) is None
    assert read_cgroup(CgroupFiles(folder=tmp_path, version=2, limit_bytes=1)) is None
