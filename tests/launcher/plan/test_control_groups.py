from pathlib import Path

from drivetrain_launcher.plan.control_groups import GroupLimits, read_group_limits


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")
    return folder


def read(root: Path, text: str) -> GroupLimits:
    proc = root / "proc"
    write(proc / "self", cgroup=text.strip())
    return read_group_limits(root / "sys", proc)


def test_the_tightest_group_around_a_process_counts_in_version_2(tmp_path: Path) -> None:
    outer = write(
        tmp_path / "sys/job",
        cpu__max="400000 100000",
        memory__max="1000",
        memory__current="600",
        memory__stat="anon 0",
    )
    write(outer / "step", cpu__max="max 100000", memory__max="max", pids__max="50", pids__current="7")
    assert read(tmp_path, "0::/job/step\n") == GroupLimits(
        cpus=4.0, memory_bytes=1000, used_bytes=600, pids=50, used_pids=7
    )


def test_version_1_has_a_hierarchy_for_each_controller(tmp_path: Path) -> None:
    write(tmp_path / "sys/cpu/job", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    write(
        tmp_path / "sys/memory/job",
        memory__limit_in_bytes="2048",
        memory__usage_in_bytes="1024",
        memory__stat="anon 0",
    )
    write(tmp_path / "sys/pids/job", pids__max="max")
    groups = "3:memory:/job\n2:cpu,cpuacct:/job\n1:pids:/job\n"
    assert read(tmp_path, groups) == GroupLimits(cpus=1.5, memory_bytes=2048, used_bytes=1024)


def test_the_page_cache_is_no_used_memory(tmp_path: Path) -> None:
    write(tmp_path / "sys/job", memory__max="1000", memory__current="900", memory__stat="inactive_file 500")
    assert read(tmp_path, "0::/job\n") == GroupLimits(memory_bytes=1000, used_bytes=400)


def test_what_version_1_writes_for_no_limit_is_none(tmp_path: Path) -> None:
    write(tmp_path / "sys/memory", memory__limit_in_bytes="9223372036854771712")
    write(tmp_path / "sys/cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert read(tmp_path, "3:memory:/\n2:cpu:/\n") == GroupLimits()


def test_a_system_without_control_groups_has_no_limits(tmp_path: Path) -> None:
    assert read_group_limits(tmp_path / "sys", tmp_path / "proc") == GroupLimits()
