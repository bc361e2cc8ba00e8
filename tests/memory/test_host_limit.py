import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain_memory.batch_size.host_limit import available_host_bytes, limit_host_memory
from processes import environment_alone

SCRIPT = """
import torch
from drivetrain_memory import find_executable_batch_size, is_out_of_memory
from drivetrain_memory.batch_size.host_limit import limit_host_memory
def refused(allocate):
    try:
        with limit_host_memory(300_000_000):
            allocate()
    except (MemoryError, RuntimeError) as error:
        return is_out_of_memory(error)
    return False
print([refused(lambda: torch.empty(n, dtype=torch.uint8)) for n in (100_000_000, 2_000_000_000)],
      [refused(lambda: bytearray(n)) for n in (100_000_000, 2_000_000_000)], bool(len(bytearray(2_000_000_000))))
"""


def job(folder: Path, membership: str, files: dict[str, str]) -> int | None:
    """Return what is available to a job whose control groups have these files."""
    for name, text in {
        "proc/self/cgroup": membership,
        **{f"root/{name}": text for name, text in files.items()},
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return available_host_bytes(cgroup_root=folder / "root", proc=folder / "proc")


def test_the_tightest_limit_above_a_group_counts_without_droppable_pages(tmp_path: Path) -> None:
    assert job(tmp_path, "0::/job/step\n", {
        "job/memory.max": "1000\n", "job/memory.current": "700\n", "job/memory.stat": "anon 500\ninactive_file 200\n",
        "job/step/memory.max": "max\n", "job/step/memory.current": "10\n", "job/step/memory.stat": "anon 10\n",
    }) == 500  # fmt: skip


def test_groups_of_version_1_are_read_and_no_limit_is_none(tmp_path: Path) -> None:
    membership = "5:devices:/\n4:memory:/job\n0::/\n"
    files = {
        "memory/job/memory.limit_in_bytes": "9223372036854771712", "memory/job/memory.usage_in_bytes": "1024",
        "memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 24\n",
    }  # fmt: skip
    assert job(tmp_path, membership, files) is None
    assert job(tmp_path, membership, {**files, "memory/job/memory.limit_in_bytes": "4096"}) == 4096 - 1000


def test_of_groups_around_a_process_the_one_with_the_least_left_counts(tmp_path: Path) -> None:
    membership = "0::/user/step\n"
    files = {
        "user/memory.max": "9000", "user/memory.current": "5000", "user/memory.stat": "",
        "user/step/memory.max": "7000", "user/step/memory.current": "1000", "user/step/memory.stat": "",
        "other/memory.max": "10", "other/memory.current": "10", "other/memory.stat": "",
    }  # fmt: skip
    assert job(tmp_path, membership, files) == 4000
    assert job(tmp_path, membership, {**files, "user/step/memory.current": "8000"}) == 0


def test_without_a_limit_the_block_runs_as_it_is() -> None:
    with limit_host_memory(None):
        assert len(bytearray(10)) == 10


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits private memory by RLIMIT_DATA")
@pytest.mark.slow
def test_allocations_beyond_the_limit_fail_and_the_limit_ends_with_the_block(python: str) -> None:
    done = subprocess.run(
        [python, "-c", SCRIPT], env=environment_alone(), capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[False, True] [False, True] True", done.stderr
