"""Elastic runs on hosts that die, freeze, come back or are cut off: network namespaces, real launchers and ranks."""

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch_fixtures import clean_environment
from launcher.hosts import Host, Launcher, hosts_fixture  # noqa: F401
from launcher.run.running import read_until, wait_for_end, wait_until
from processes import free_port

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
# Ranks that need no torch, and run until a file says that it is enough.
WAITS = """
import os, time
from pathlib import Path
print("started rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "process", os.getpid(), flush=True)
while not Path("enough").exists():
    if (fail := Path("fail" + os.environ["RANK"])).exists():
        fail.unlink()
        raise SystemExit(5)
    time.sleep(0.05)
"""
MakeHosts = Callable[[int], list[Host]]


def on_hosts(test: Callable) -> Callable:
    """Mark a test that has hosts of its own."""
    return pytest.mark.slow(pytest.mark.undisturbed(pytest.mark.timeout(600)(test)))


def start(host: Host, script: Callable, *flags: str, nodes: str = "1:3") -> Launcher:
    script(STEPS)
    return host.start(
        *("launch", "--cpu", "--nnodes", nodes, "--rdzv-backend", "c10d", "--rdzv-id", "run"),
        *("--master-addr", "10.213.7.1", "--nproc-per-node", "1", *flags, "script.py"),
        environment=clean_environment(),
    )


def start_all(made: list[Host], script: Callable, *flags: str, nodes: str = "1:3") -> list[Launcher]:
    """Start a launcher on each host, one after the other, and wait until their ranks run."""
    launchers: list[Launcher] = []
    for host in made:
        launchers.append(start(host, script, *flags, nodes=nodes))
        time.sleep(1)
    for launcher in launchers:
        launcher.wait_for(f"of {len(made)} process")
    return launchers


def end_well(tmp_path: Path, launchers: list[Launcher], made: list[Host]) -> None:
    """Let the ranks end, and hold every launcher to its exit code and every host to have nothing left."""
    (tmp_path / "enough").touch()
    codes = [launcher.end() for launcher in launchers]
    assert codes == [0] * len(launchers), [launcher.output for launcher in launchers]
    wait_until(lambda: not any(host.pids() for host in made))


def say_measured(what: str, seconds: float) -> None:
    """Show a time with `-s`; docs/howto/elastic.md gives those of a quiet machine."""
    print(f"\nmeasured: {what}: {seconds:.1f} s")


@on_hosts
@pytest.mark.parametrize("how", ["kill", "freeze", "cut", "stop"])
def test_a_host_that_is_gone_is_left_behind_and_taken_in_when_it_comes_back(
    hosts: MakeHosts, script: Callable, tmp_path: Path, how: str
) -> None:
    made = hosts(3)
    launchers = start_all(made, script)
    gone, launcher = made[1], launchers[1]
    old = [int(pid) for pid in re.findall(r"process (\d+)", launcher.output)]
    if how == "stop":
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.end() == 128 + signal.SIGTERM
    else:
        getattr(gone, how)()
    say_measured(f"{how}, noticed by the others", launchers[0].wait_for("going on with"))
    launchers[0].wait_for("started rank 0 of 2")
    why = "was stopped" if how == "stop" else r"has been silent for ([6-9]|\d\d+) s"
    said = rf"node \d \(host b\) {why}; going on with 2 of 3 nodes \(2 processes\)"
    for other in (launchers[0], launchers[2]):
        assert re.search(said, other.output), other.output
    if how == "cut":
        assert launcher.end() == 1
        assert (
            "the host of the store of this run (10.213.7.1:29500) has been silent for 6 s" in launcher.output
        )
        wait_until(lambda: not gone.pids())
        gone.repair()
    if how == "freeze":
        gone.thaw()
        began = time.monotonic()
        wait_for_end(old)
        say_measured("thawed, its old ranks ended", time.monotonic() - began)
        launcher.wait_for("this node was frozen or silent, and the others went on without it")
    else:
        launchers[1] = start(gone, script)
        came = "a new node (host b) came: the ranks have 30 s to save before they start again"
        launchers[0].wait_for(came)
        launchers[1].wait_for("the run goes on with 3 nodes (3 processes)")
    launchers[0].wait_for("started rank 0 of 3", count=2)
    end_well(tmp_path, launchers, made)


@on_hosts
@pytest.mark.parametrize("how", ["kill", "freeze", "cut"])
def test_the_run_ends_on_every_host_when_that_of_the_store_is_gone(
    hosts: MakeHosts, script: Callable, tmp_path: Path, how: str
) -> None:
    made = hosts(3)
    launchers = start_all(made, script)
    getattr(made[0], how)()
    began = time.monotonic()
    assert [launcher.end() for launcher in launchers[1:]] == [1, 1]
    say_measured(f"host of the store: {how}, the others have ended", time.monotonic() - began)
    said = "has closed its connection" if how == "kill" else "has been silent for 6 s"
    for launcher in launchers[1:]:
        assert f"the host of the store of this run (10.213.7.1:29500) {said}" in launcher.output
    wait_until(lambda: not any(host.pids() for host in made[1:]))
    if how == "kill":
        return
    made[0].thaw()  # it is the only one left, and one is enough
    launchers[0].wait_for("started rank 0 of 1")
    end_well(tmp_path, launchers[:1], made)


@on_hosts
def test_a_slow_link_that_loses_packets_loses_no_host(
    hosts: MakeHosts, script: Callable, tmp_path: Path
) -> None:
    made = hosts(2)
    made[1].slow(delay_seconds=0.2, loss=0.05)
    launchers = start_all(made, script, nodes="1:2")
    starts = [launcher.output.count("started rank") for launcher in launchers]
    time.sleep(30)
    assert [launcher.output.count("started rank") for launcher in launchers] == starts
    assert "silent" not in launchers[0].output + launchers[1].output
    end_well(tmp_path, launchers, made)


def on_loopback(started: Callable, *flags: str, silence_seconds: int) -> list:
    """Start two nodes of an elastic run on this machine and wait until their ranks run; the first leads."""
    place = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    place += ("--node-silence-seconds", str(silence_seconds))
    meeting = ("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-id", "loop", "--nproc-per-node", "1")
    nodes = [started("launch", "--cpu", *meeting, *place, *flags, "script.py") for _ in range(2)]
    ranks = [re.findall(r"rank (\d) of 2 process", read_until(node, "of 2 process"))[0] for node in nodes]
    assert sorted(ranks) == ["0", "1"]
    return nodes if ranks == ["0", "1"] else nodes[::-1]


@pytest.mark.slow
def test_on_one_machine_a_node_that_dies_is_left_behind(
    started_with_torch: Callable, script: Callable, tmp_path: Path
) -> None:
    script(WAITS)
    leader, other = on_loopback(started_with_torch, silence_seconds=3)
    other.kill()
    said = read_until(leader, "going on with 1 of 2 nodes (1 process)")
    assert re.search(r"node 1 \(host .*\) has been silent for ([3-9]|\d\d+) s; ", said)
    read_until(leader, "started rank 0 of 1")
    (tmp_path / "enough").touch()
    assert leader.wait(60) == 0
    assert "its ranks stop" in other.stdout.read()  # ends when nothing of that node is left


@pytest.mark.slow
def test_ranks_that_fail_restart_on_all_nodes_as_often_as_they_may_and_then_end_all_with_their_exit_code(
    started_with_torch: Callable, script: Callable, tmp_path: Path
) -> None:
    script(WAITS)
    nodes = on_loopback(started_with_torch, "--max-restarts", "1", silence_seconds=60)
    (tmp_path / "fail1").touch()
    read_until(nodes[1], "restarting all ranks (1 of 1)")
    assert "node 1 (host" in read_until(nodes[0], "restarts its ranks; going on with 2 nodes (2 processes)")
    for node in nodes:
        read_until(node, "of 2 process")
    (tmp_path / "fail1").touch()
    outputs = [node.stdout.read() for node in nodes]
    assert [node.wait(60) for node in nodes] == [5, 5], outputs
    assert "the ranks of node 1 (host" in outputs[0]
    assert "rank 1 (local rank 0, process" in outputs[1]


@pytest.mark.slow
def test_a_store_that_cannot_be_reached_is_an_error_that_says_where_it_was_looked_for(
    drivetrain_with_torch: Callable, script: Callable
) -> None:
    script(WAITS)
    done = drivetrain_with_torch(
        *("launch", "--cpu", "--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-id", "loop"),
        *("--master-addr", "192.0.2.1", "--rdzv-timeout-seconds", "1", "--nproc-per-node", "1", "script.py"),
    )
    assert done.returncode == 2
    assert "the store of run 'loop' at 192.0.2.1:29500 did not answer within 1 s" in done.stderr
