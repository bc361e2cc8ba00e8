"""TPUs found among the devices of a PCI bus, and what torch_tpu reads in the processes of a launch."""

from pathlib import Path
from typing import Any

import pytest

from drivetrain_clusters.protocol import JobPlacement
from drivetrain_clusters.tpu_pod.cluster import TpuPod
from drivetrain_config import Layers
from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.plan.host_detection import Host, accelerator_may_exist
from drivetrain_launcher.plan.launch_plan import LaunchPlan, LaunchTarget
from drivetrain_launcher.plan.launch_planner import plan_launch
from drivetrain_launcher.plan.resolved_launch import resolve_launch
from drivetrain_launcher.plan.tpu_host import ADDRESSES, TOPOLOGY, TpuHost, find_tpus
from drivetrain_launcher.settings import LaunchSettings

V5E = TpuHost(generation="v5e", num_devices=4, topologies={1: "1,1,1", 4: "2,2,1", 8: "2,4,1"})


def bus(root: Path, *devices: tuple[str, str, bool]) -> Path:
    """A PCI bus of devices: vendor, device, and whether processes may open it."""
    for number, (vendor, device, is_open) in enumerate(devices):
        folder = root / f"sys/bus/pci/devices/0000:00:{number:02}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{device}\n")
        group = root / f"sys/kernel/iommu_groups/{number}"
        group.mkdir(parents=True)
        (folder / "iommu_group").symlink_to(group)
        if is_open:
            (root / "dev/vfio").mkdir(parents=True, exist_ok=True)
            (root / f"dev/vfio/{number}").touch()
    return root


def test_tpus_are_what_the_bus_lists_and_processes_may_open(tmp_path: Path) -> None:
    tpu, network = ("0x1ae0", "0x0063"), ("0x1ae0", "0x0042")
    root = bus(
        tmp_path, (*tpu, True), (*network, True), (*tpu, True), ("0x10de", "0x0063", True), (*tpu, False)
    )
    found = find_tpus(root)
    assert found is not None
    assert (found.generation, found.num_devices, found.topologies[4]) == ("v5e", 2, "2,2,1")


def test_other_machines_have_none(tmp_path: Path) -> None:
    assert find_tpus(tmp_path) is None
    assert find_tpus(bus(tmp_path, ("0x10de", "0x2330", True))) is None


def test_a_group_of_the_bus_is_a_sign_of_an_accelerator(tmp_path: Path) -> None:
    (tmp_path / "null").touch()
    assert not accelerator_may_exist(tmp_path)
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio" / "3").touch()
    assert accelerator_may_exist(tmp_path)


def planned(tpus: TpuHost = V5E, placement: JobPlacement | None = None, **said: Any) -> LaunchPlan:
    host = Host(accelerator="tpu", accelerator_count=tpus.num_devices, tpus=tpus)
    return plan_launch(LaunchSettings(**said), LaunchTarget(name="train.py"), host, placement=placement)


def test_each_process_has_a_device_and_knows_where_all_meet() -> None:
    ranks = planned().ranks()
    assert [rank.environment["LOCAL_RANK"] for rank in ranks] == ["0", "1", "2", "3"]
    for rank in ranks:
        assert rank.environment[ADDRESSES] == "localhost:8070,localhost:8071,localhost:8072,localhost:8073"
        assert rank.environment[TOPOLOGY] == "2,2,1"


def test_what_the_environment_says_is_kept() -> None:
    said = {ADDRESSES: "a:1,b:2", TOPOLOGY: "1,2,1"}
    (first, _) = planned(
        TpuHost(generation="v5e", num_devices=2, topologies={}, given=said), num_processes=2
    ).ranks()
    assert {name: first.environment[name] for name in said} == said


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            {"num_processes": 3},
            r"3 processes on a host of 4 TPU v5e devices: 1, 4, 8 devices of it make a slice",
        ),
        ({"num_processes": 5}, r"it has 4 tpu devices to give them"),
        ({"devices": (0, 1)}, r"tpu devices cannot be chosen"),
        ({"preload": ("torch",)}, r"--preload torch: a forked process cannot use a TPU"),
        ({"num_nodes": 2, "node_rank": 0, "master_addr": "a"}, rf"2 hosts with TPUs: set {TOPOLOGY} on each"),
    ],
)
def test_what_cannot_run_is_refused(said: dict[str, Any], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        planned(**said)


def test_hosts_that_nothing_names_are_asked_for() -> None:
    tpus = TpuHost(generation="v6e", num_devices=4, topologies={4: "2,2,1"}, given={TOPOLOGY: "2,4,1"})
    with pytest.raises(
        LaunchError, match=r"2 hosts with TPUs, of which 0 are named: set TPU_WORKER_HOSTNAMES"
    ):
        planned(tpus, num_nodes=2, node_rank=0, master_addr="a")


@pytest.mark.parametrize("by", ["the place in a slice", "a variable"])
def test_the_processes_of_several_hosts_meet_in_the_order_of_the_hosts(by: str) -> None:
    given = {TOPOLOGY: "2,2,1", "TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}
    place = TpuPod().placement(given) if by == "the place in a slice" else None
    said: dict[str, Any] = {} if place else {"num_nodes": 2, "node_rank": 1, "master_addr": "a"}
    tpus = TpuHost(generation="v5e", num_devices=2, topologies={}, given=given)
    settings = LaunchSettings(**said) if place is None else resolve_launch(Layers({}), placement=place).launch
    plan = plan_launch(
        settings,
        LaunchTarget(name="train.py"),
        Host(accelerator="tpu", accelerator_count=2, tpus=tpus),
        placement=place,
    )
    first, second = plan.ranks()
    assert (first.rank, second.rank) == (2, 3)
    assert first.environment[ADDRESSES] == "a:8070,a:8071,b:8070,b:8071"
    assert first.environment[TOPOLOGY] == "2,2,1"
