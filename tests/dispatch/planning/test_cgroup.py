from pathlib import Path

import psutil
import pytest

from drivetrain_dispatch.planning.cgroup import free_of_cgroup
from drivetrain_dispatch.planning.memory_budget import get_max_memory


def second(folder: Path, limit: str, used: int, stat: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(stat)


def first(folder: Path, limit: int, used: int, stat: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(stat)


@pytest.fixture
def process(tmp_path: Path) -> Path:
    path = tmp_path / "of the process"
    path.write_text("")
    return path


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path, process: Path) -> None:
    second(tmp_path, "3000000", 1_000_000)
    process.write_text("0::/docker/not/seen/inside\n")
    assert free_of_cgroup(root=tmp_path, process=process) == 2_000_000
    # The cache of files counts as used there, but is given back when memory is asked for.
    second(tmp_path, "3000000", 1_000_000, "anon 200000\nactive_file 300000\ninactive_file 500000\n")
    assert free_of_cgroup(root=tmp_path, process=process) == 2_800_000
    second(tmp_path, "max", 1_000_000)
    assert free_of_cgroup(root=tmp_path, process=process) is None


def test_of_groups_around_a_process_the_smallest_counts(tmp_path: Path, process: Path) -> None:
    process.write_text("0::/user/session/step\n")
    second(tmp_path / "user", "9000000", 5_000_000)
    second(tmp_path / "user" / "session", "max", 5_000_000)
    second(tmp_path / "user" / "session" / "step", "7000000", 1_000_000)
    second(tmp_path / "other", "10", 10)
    assert free_of_cgroup(root=tmp_path, process=process) == 4_000_000


def test_the_first_version_is_read_too(tmp_path: Path, process: Path) -> None:
    process.write_text("5:cpu:/elsewhere\n4:memory:/slurm/job\n0::/\n")
    unlimited = 9223372036854771712
    first(tmp_path / "memory", unlimited, 5_000_000)
    first(tmp_path / "memory" / "slurm", 8_000_000, 3_000_000)
    first(
        tmp_path / "memory" / "slurm" / "job",
        6_000_000,
        3_000_000,
        "inactive_file 1\ntotal_inactive_file 500000\n",
    )
    assert free_of_cgroup(root=tmp_path, process=process) == 3_500_000


def test_a_group_that_is_full_leaves_nothing(tmp_path: Path, process: Path) -> None:
    second(tmp_path, "1000", 2000)
    assert free_of_cgroup(root=tmp_path, process=process) == 0


def test_a_system_without_groups_says_nothing(tmp_path: Path) -> None:
    assert free_of_cgroup(root=tmp_path, process=tmp_path / "none") is None


def test_this_machine_gives_no_more_than_it_has() -> None:
    free = free_of_cgroup()
    assert free is None or free >= 0
    assert get_max_memory()["cpu"] <= psutil.virtual_memory().total
