"""What a host has, read from copies of the kernel's folders and from those of this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_launcher import Host
from drivetrain_launcher.plan.host_detection import (
    Core,
    accelerator_may_exist,
    detect_cpu_topology,
    detect_host,
    format_cpu_list,
    parse_cpu_list,
    read_cpu_topology,
)


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    (tmp_path / "null").touch()
    return tmp_path


def test_a_machine_without_drivers_has_no_accelerator(dev: Path) -> None:
    (dev / "tty0").touch()
    assert not accelerator_may_exist(dev)


@pytest.mark.parametrize("node", ["nvidia0", "kfd", "dri/renderD128", "accel0", "davinci1", "dxg"])
def test_a_driver_leaves_a_mark(dev: Path, node: str) -> None:
    (dev / node).parent.mkdir(exist_ok=True)
    (dev / node).touch()
    assert accelerator_may_exist(dev)


def test_a_system_without_marks_must_be_asked(tmp_path: Path) -> None:
    assert accelerator_may_exist(tmp_path / "nowhere")


def test_the_cpu_asks_nothing() -> None:
    source = (
        "import sys; sys.modules['torch'] = None\n"
        "from drivetrain_launcher.plan.host_detection import detect_host; print(detect_host('cpu').accelerator_count)"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "0\n", done.stderr


def test_a_kind_that_is_not_here_counts_none() -> None:
    host = detect_host("hpu")
    assert isinstance(host, Host)
    assert (host.accelerator, host.accelerator_count) == ("hpu", 0)


ALL = set(range(8))


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """Return the root of a machine with two NUMA nodes of two cores with two threads each, and four NVIDIA GPUs."""
    cpus = tmp_path / "sys/devices/system/cpu"
    for cpu in range(8):
        write(cpus / f"cpu{cpu}/topology/thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}")
    write(cpus / "online", "0-7")
    for node, text in enumerate(("0-1,4-5", "2-3,6-7")):
        write(tmp_path / f"sys/devices/system/node/node{node}/cpulist", text)
    for number, node in enumerate((1, 1, 0, -1)):
        address = f"0000:{number:02X}:00.0"
        write(tmp_path / f"sys/bus/pci/devices/{address.lower()}/numa_node", str(node))
        write(
            tmp_path / f"proc/driver/nvidia/gpus/{address}/information",
            f"Model: \t NVIDIA H100\nGPU UUID: \t GPU-{number}{number}\nDevice Minor: \t {3 - number}",
        )
        write(tmp_path / f"dev/nvidia{number}", "")
    return tmp_path


def write(file: Path, text: str) -> None:
    """Write a file as the kernel does, with its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def test_threads_of_a_core_belong_together_and_each_core_to_its_node(two_sockets: Path) -> None:
    found = read_cpu_topology(two_sockets, usable=ALL)
    assert found.cores == (
        Core(cpus=(0, 4), numa_node=0),
        Core(cpus=(1, 5), numa_node=0),
        Core(cpus=(2, 6), numa_node=1),
        Core(cpus=(3, 7), numa_node=1),
    )
    assert not found.is_bound
    assert found.device_nodes == ()  # a run on the CPU


def test_only_usable_cpus_count(two_sockets: Path) -> None:
    found = read_cpu_topology(two_sockets, usable={1, 6, 7})
    assert found.cores == (
        Core(cpus=(1,), numa_node=0),
        Core(cpus=(6,), numa_node=1),
        Core(cpus=(7,), numa_node=1),
    )
    assert found.is_bound


def test_nvidias_gpus_are_found_by_number_and_uuid(two_sockets: Path) -> None:
    assert read_cpu_topology(two_sockets, usable=ALL, accelerator="cuda").device_nodes == (1, 1, 0, None)
    chosen = ("2", "GPU-00", "9", "MIG-1")
    found = read_cpu_topology(two_sockets, usable=ALL, accelerator="cuda", visible=chosen)
    assert found.device_nodes == (0, 1, None, None)


def test_a_gpu_that_the_control_group_denies_has_no_number(two_sockets: Path) -> None:
    (two_sockets / "dev/nvidia3").unlink()  # that of the first address
    found = read_cpu_topology(two_sockets, usable=ALL, accelerator="cuda")
    assert found.device_nodes == (1, 0, None)


def test_amds_gpus_are_found_by_their_drivers_nodes(tmp_path: Path) -> None:
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    write(nodes / "0/properties", "cpu_cores_count 8\nsimd_count 0\nlocation_id 0\ndomain 0")
    for number, (bus, node) in enumerate(((0x43, 1), (0x03, 0)), start=1):
        write(
            nodes / f"{number}/properties",
            f"cpu_cores_count 0\nsimd_count 304\nlocation_id {bus << 8}\ndomain 1",
        )
        write(tmp_path / f"sys/bus/pci/devices/0001:{bus:02x}:00.0/numa_node", str(node))
    assert read_cpu_topology(tmp_path, usable={0}, accelerator="cuda").device_nodes == (1, 0)


def test_a_kernel_that_tells_nothing_leaves_each_cpu_a_core_of_one_node(tmp_path: Path) -> None:
    found = read_cpu_topology(tmp_path, usable={0, 1}, accelerator="cuda")
    assert found.cores == (Core(cpus=(0,), numa_node=0), Core(cpus=(1,), numa_node=0))
    assert found.device_nodes == ()


@pytest.mark.skipif(sys.platform != "linux", reason="cores are bound on Linux")
def test_this_machines_cpus_are_each_in_one_core() -> None:
    cpus = [cpu for core in detect_cpu_topology(None).cores for cpu in core.cpus]
    assert sorted(cpus) == sorted(os.sched_getaffinity(0))


@given(st.sets(st.integers(0, 300), min_size=1))
def test_lists_are_read_as_they_are_written(cpus: set[int]) -> None:
    assert parse_cpu_list(format_cpu_list(sorted(cpus))) == tuple(sorted(cpus))


def test_lists_are_written_as_the_kernel_does() -> None:
    assert format_cpu_list((0, 1, 2, 3, 8, 10, 11)) == "0-3,8,10-11"
    assert parse_cpu_list("0-3,8,10-11\n") == (0, 1, 2, 3, 8, 10, 11)
    assert parse_cpu_list("\n") == ()
