"""Elastic runs on hosts that die, freeze, come back or are cut off: network namespaces, real launchers and ranks."""

from collections.abc import Callable

import pytest

from launcher.conftest import clean_environment
from launcher.hosts import Host, Launcher, hosts  # noqa: F401 - a fixture

pytestmark = [pytest.mark.slow, pytest.mark.undisturbed]

# Ranks that meet in a collective ten times a second, until a file says that it is enough.
STEPS = """
import os, time
from pathlib import Path
import torch, torch.distributed as dist
dist.init_process_group("gloo")
name = f"rank {dist.get_rank()} of {dist.get_world_size()}"
print("started", name, "process", os.getpid(), flush=True)
while True:
    enough = torch.tensor(float(Path("enough").exists()))
    dist.all_reduce(enough)
    if enough:
        break
    time.sleep(0.1)
print("ended", name, flush=True)
dist.destroy_process_group()
"""


def test_a_host_that_is_killed_is_left_behind_within_seconds(
    hosts: Callable[[int], list[Host]], script: Callable, tmp_path
) -> None:
    first, second, third = made = hosts(3)
    launchers = [start(host, script) for host in made]
    for launcher in launchers:
        launcher.wait_for("started rank")
    second.kill()
    took = launchers[0].wait_for("started rank 0 of 2")
    said = launchers[0].output
    print("KILL TOOK", took, said)
    assert "node 1 (host b) has been silent for" in said or "node 2 (host b) has been silent for" in said
    (tmp_path / "enough").touch()
    assert [launchers[0].end(), launchers[2].end()] == [0, 0]
    assert first.pids() == second.pids() == third.pids() == []


def start(host: Host, script: Callable, *flags: str, least: int = 1, most: int = 3) -> Launcher:
    script(STEPS)
    return host.start(
        *("launch", "--cpu", "--nnodes", f"{least}:{most}", "--rdzv-backend", "c10d", "--rdzv-id", "run"),
        *("--master-addr", "10.213.7.1", "--nproc-per-node", "1", *flags, "script.py"),
        environment=clean_environment(),
    )
