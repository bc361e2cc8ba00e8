"""Doctors of several hosts: on the loopback interface, and in network namespaces with faults in between."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from drivetrain_config.environ import child_environment
from processes import free_port

MASTER = "10.177.0.1"
LEFT_OUT = ("DRIVETRAIN_", "GLOO_", "NCCL_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "OMP_")
Start = Callable[..., subprocess.Popen[str]]


def environment(**variables: str) -> dict[str, str]:
    kept = {name: text for name, text in child_environment().items() if not name.startswith(LEFT_OUT)}
    return {**kept, **variables}


def checks(done: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in done["together"]}


def whats(check: dict[str, Any]) -> list[str]:
    return [finding["what"] for finding in check["findings"]]


@pytest.mark.slow
def test_two_doctors_on_one_machine_meet_and_check_together(python: str, tmp_path: Path) -> None:
    port = str(free_port())
    flags = f"--cpu --json --num-workers 0 --num-nodes 2 --master-addr 127.0.0.1 --master-port {port}"
    command = [python, "-m", "drivetrain_launcher", "doctor", *flags.split(), "--wait-seconds", "100"]
    running = [
        subprocess.Popen(
            [*command, "--node-rank", str(rank)],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=170) for process in running]
    whole, own = (json.loads(output) for output, _ in outputs)
    together = checks(whole)
    assert [name for name, check in together.items() if check["state"] != "ok"] in (
        [],
        ["gloo between hosts"],
    )
    assert together["rendezvous"]["summary"] == f"2 of 2 hosts joined at 127.0.0.1:{port}"
    assert together["gloo between hosts"]["summary"].startswith("1 pair: ")
    assert [host["host"].split()[1] for host in whole["hosts"]] == ["0", "1"]
    # Host 1 is told that the loopback address is itself, and both say that the run would break.
    assert (len(own["hosts"]), own["together"]) == (1, [])
    assert [process.returncode for process in running] == [1, 1]
    findings = [found for host in whole["hosts"] for check in host["checks"] for found in check["findings"]]
    errors = [found["what"] for found in findings if found["severity"] == "error"]
    assert errors[-1] == "--master-addr 127.0.0.1 resolves to 127.0.0.1, which is this host itself"


def has_namespaces() -> bool:
    if sys.platform != "linux" or os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        return False
    made = subprocess.run(["ip", "netns", "add", "dt-doctor-try"], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", "dt-doctor-try"], capture_output=True, check=False)
    return not made.returncode


slow_with_hosts = pytest.mark.skipif(not has_namespaces(), reason="makes network namespaces, as root")


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Three network namespaces on one bridge, whose interface eth0 has the addresses 10.177.0.1 to 3."""
    tag = f"dtd{os.getpid() % 10000}"
    names = [f"{tag}-{index}" for index in range(3)]
    switch = f"{tag}-s"
    try:
        for name in (switch, *names):
            ip(f"netns add {name}")
            ip(f"-n {name} link set lo up")
        ip(f"-n {switch} link add br0 type bridge")
        ip(f"-n {switch} link set br0 up")
        for index, name in enumerate(names):
            ip(f"link add eth0 netns {name} type veth peer name p{index} netns {switch}")
            ip(f"-n {switch} link set p{index} master br0 up")
            ip(f"-n {name} addr add 10.177.0.{index + 1}/24 dev eth0")
            ip(f"-n {name} link set eth0 up")
        yield names
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.fixture
def start(hosts: list[str], tmp_path: Path) -> Iterator[Start]:
    """Start `drivetrain doctor` on a host, with its own name and its own /etc/hosts."""
    running: list[subprocess.Popen[str]] = []

    def begin(
        rank: int, *arguments: str, own_address: str | None = None, **variables: str
    ) -> subprocess.Popen[str]:
        table = tmp_path / f"hosts{rank}"
        lines = [
            f"10.177.0.{index + 1} node{index}" for index in range(3) if index != rank or own_address is None
        ]
        lines += [] if own_address is None else [f"{own_address} node{rank}"]
        table.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        shell = f"hostname node{rank} && mount --bind {table} /etc/hosts && mount --bind /dev/null /etc/resolv.conf"
        command = [sys.executable, "-m", "drivetrain_launcher", "doctor", "--cpu", "--num-workers", "0"]
        waits = () if "--wait-seconds" in arguments else ("--wait-seconds", "150")
        command += ["--node-rank", str(rank), "--master-addr", MASTER, *waits, *arguments]
        around = [*f"ip netns exec {hosts[rank]} unshare -mu sh -c".split(), f'{shell} && exec "$@"', "sh"]
        with (tmp_path / f"progress{rank}").open("w") as progress:
            process = subprocess.Popen(
                [*around, *command],
                cwd=tmp_path,
                env=environment(**variables),
                stdout=subprocess.PIPE,
                stderr=progress,
                text=True,
                start_new_session=True,
            )
        running.append(process)
        return process

    yield begin
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.slow
@pytest.mark.timeout(600)
@slow_with_hosts
def test_a_host_behind_a_slow_link_is_named(hosts: list[str], start: Start) -> None:
    ip(f"netns exec {hosts[2]} tc qdisc add dev eth0 root tbf rate 40mbit burst 64k latency 200ms")
    running = [start(rank, "--num-nodes", "3", "--json") for rank in range(3)]
    whole = json.loads(running[0].communicate(timeout=500)[0])
    together = checks(whole)
    named = [what for what in whats(together["gloo between hosts"]) if "is slow: " in what]
    assert len(named) == 1, together["gloo between hosts"]
    assert named[0].startswith("host 2 (node2, 10.177.0.3) is slow: ")
    assert together["connections between hosts"]["summary"] == "6 of 6 connections between hosts work"
    assert running[0].returncode == 0, whole


@pytest.mark.slow
@pytest.mark.timeout(600)
@slow_with_hosts
def test_a_frozen_host_is_named_and_the_others_go_on(start: Start, tmp_path: Path) -> None:
    others = [start(rank, "--num-nodes", "3", "--json") for rank in (1, 2)]
    progress = tmp_path / "progress2"
    deadline = time.monotonic() + 300
    while "waiting for host 0" not in progress.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    leader = start(0, "--num-nodes", "3", "--json")
    while "joined; waiting for the other hosts" not in progress.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(others[1].pid, signal.SIGSTOP)
    whole = json.loads(leader.communicate(timeout=400)[0])
    together = checks(whole)
    silent = whats(together["connections between hosts"])
    assert silent == ["host 2 (node2, 10.177.0.3) joined, and then stopped answering"]
    assert together["gloo between hosts"]["summary"].startswith("1 pair: ")
    assert leader.returncode == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@slow_with_hosts
def test_a_host_that_never_comes_is_named_after_the_time_that_it_had(start: Start) -> None:
    leader = start(0, "--num-nodes", "2", "--wait-seconds", "2")
    output = leader.communicate(timeout=400)[0]
    assert "error: host 1 did not join within 2 s" in output
    assert leader.returncode == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@slow_with_hosts
def test_debians_own_name_is_told_and_gloo_fails_as_a_run_would(start: Start) -> None:
    leader, _ = (start(rank, "--num-nodes", "2", "--json", own_address="127.0.1.1") for rank in (0, 1))
    whole = json.loads(leader.communicate(timeout=500)[0])
    (told,) = [c for c in whole["hosts"][1]["checks"] if c["name"] == "addresses"]
    assert "this host's own name, node1, resolves to 127.0.1.1, by /etc/hosts" in whats(told)[0]
    assert "export GLOO_SOCKET_IFNAME=eth0" in told["findings"][0]["repair"]
    assert checks(whole)["gloo between hosts"]["state"] == "error"
    assert leader.returncode == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@slow_with_hosts
def test_hosts_without_a_way_to_each_other_are_named_and_gloo_is_not_tried(
    hosts: list[str], start: Start
) -> None:
    ip(f"-n {hosts[1]} route add prohibit 10.177.0.3/32")
    running = [start(rank, "--num-nodes", "3", "--json") for rank in range(3)]
    together = checks(json.loads(running[0].communicate(timeout=500)[0]))
    told = whats(together["connections between hosts"])
    assert [what.partition(" (n")[0] for what in told] == ["host 1", "host 2"]
    assert "cannot connect to host 2 (node2, 10.177.0.3)" in told[0]
    assert together["gloo between hosts"]["state"] == "skipped"
    assert [process.wait(100) for process in running] == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.timeout(300)
@slow_with_hosts
def test_a_small_shared_memory_and_a_full_folder_of_this_host(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    shell = (
        "mount -t tmpfs -o size=64m tmpfs /dev/shm && "
        f"mount -t tmpfs -o size=4m tmpfs {folder} && head -c 4m /dev/zero > {folder}/full; "
        f'ulimit -n 128; exec "$@"'
    )
    flags = ["--cpu", "--num-processes", "1", "--json", "--folder", str(folder), "--batch-megabytes", "20"]
    command = [sys.executable, "-m", "drivetrain_launcher", "doctor", *flags]
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", shell, "sh", *command],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    found = {check["name"]: check for check in json.loads(done.stdout)["hosts"][0]["checks"]}
    assert whats(found["shared memory"]) == [
        "/dev/shm has 67.11 MB free of 67.11 MB, and this run needs 180.00 MB"
    ]
    assert whats(found["checkpoint disk"]) == [
        f"writing into {folder} (tmpfs) fails: the file system is full"
    ]
    assert whats(found["limits"]) == ["at most 128 open files (ulimit -n)"]
    assert {found[name]["state"] for name in ("shared memory", "checkpoint disk", "limits")} == {"error"}
    assert done.returncode == 1
