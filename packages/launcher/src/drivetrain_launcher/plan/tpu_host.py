"""The TPUs of this host, and what torch_tpu reads in each process of a launch; nothing here imports torch_tpu.

torch_tpu reads two variables before it starts: where the processes of a slice meet, and how its chips are wired.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from drivetrain_launcher.errors import LaunchError

ADDRESSES, TOPOLOGY = "TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY"
HOSTS = "TPU_WORKER_HOSTNAMES"
_FIRST_PORT = 8070
_VENDOR = "0x1ae0"  # Google's number on the PCI bus
# By the chip's number on that bus: the generation, and the wiring of so many devices of a host in torch_tpu's words.
_LINES = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,2,2"}
_PLANES = {1: "1,1,1", 4: "2,2,1", 8: "2,4,1"}
_GENERATIONS: Mapping[str, tuple[str, Mapping[int, str]]] = {
    "0x005e": ("v4", _LINES),
    "0x0062": ("v5p", _LINES),
    "0x0063": ("v5e", _PLANES),
    "0x006f": ("v6e", _PLANES),
    "0x0076": ("v7", {2: "1,1,1,2", 4: "1,2,1,2", 8: "2,2,1,2"}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuHost:
    """The TPUs of a host.

    Attributes:
        generation: The devices' generation, such as "v5e".
        num_devices: The number of devices that processes may open.
        topologies: The wiring of a number of devices, as torch_tpu reads it.
        given: The values that the launcher's own environment has of ADDRESSES, TOPOLOGY and HOSTS, which is kept.
    """

    generation: str
    num_devices: int
    topologies: Mapping[int, str]
    given: Mapping[str, str] = field(default_factory=dict[str, str])


def find_tpus(root: Path = Path("/")) -> TpuHost | None:
    """Return the TPUs that the kernel lists and processes may open; None without any. `root` has `sys` and `dev`."""
    found: list[str] = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        texts = [
            (device / name).read_text().strip() for name in ("vendor", "device") if (device / name).exists()
        ]
        if len(texts) < 2 or texts[0] != _VENDOR or texts[1] not in _GENERATIONS:
            continue
        group = device / "iommu_group"
        if group.exists() and (root / "dev/vfio" / group.resolve().name).exists():
            found.append(texts[1])
    if not found:
        return None
    generation, topologies = _GENERATIONS[found[0]]
    return TpuHost(generation=generation, num_devices=len(found), topologies=topologies)


def tpu_environment(
    tpus: TpuHost, *, num_processes: int, num_nodes: int, hosts: Sequence[str]
) -> dict[str, str]:
    """Return the variables that torch_tpu reads in the processes of a launch, one process a device. Pure.

    All hosts are alike; `hosts` are their names by rank, empty where nothing tells. A LaunchError says that so many
    devices of a host are not wired to each other, or that nothing says where the hosts are.
    """
    topology = tpus.given.get(TOPOLOGY) or (tpus.topologies.get(num_processes) if num_nodes == 1 else None)
    if topology is None and num_nodes == 1:
        allowed = ", ".join(map(str, tpus.topologies))
        raise LaunchError(
            f"{num_processes} processes on a host of {tpus.num_devices} TPU {tpus.generation} devices: {allowed} "
            f"devices of it make a slice; say --num-processes with one of these, or set {TOPOLOGY}"
        )
    if topology is None:
        raise LaunchError(
            f"{num_nodes} hosts with TPUs: set {TOPOLOGY} on each to the wiring of the whole slice, such as 4,4,1"
        )
    named = hosts or tuple(filter(None, tpus.given.get(HOSTS, "").split(",")))
    hosts = ("localhost",) if num_nodes == 1 else named
    if len(hosts) != num_nodes and ADDRESSES not in tpus.given:
        raise LaunchError(
            f"{num_nodes} hosts with TPUs, of which {len(hosts)} are named: set {HOSTS} to the names of all "
            f"on each host, or {ADDRESSES} to HOST:PORT of each device"
        )
    addresses = [f"{host}:{_FIRST_PORT + device}" for host in hosts for device in range(num_processes)]
    return {ADDRESSES: tpus.given.get(ADDRESSES) or ",".join(addresses), TOPOLOGY: topology}
