"""Detect cheaply what a plan needs of the host: accelerators, cores, and the NUMA node of each."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from drivetrain_config import environ
from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.plan.tpu_host import ADDRESSES, HOSTS, TOPOLOGY, TpuHost, find_tpus

# Drivers' files in /dev: NVIDIA (dxg in WSL), AMD, DRI (Intel and others), Habana, TPUs, Huawei, Cambricon.
_DEVICE_NODES = (
    "nvidia[0-9]*", "dxg", "kfd", "dri/renderD*", "accel*", "vfio/[0-9]*", "davinci[0-9]*", "cambricon_dev*",
)  # fmt: skip
# Where the Linux kernel describes processors and devices, below the root.
_CPUS = Path("sys/devices/system/cpu")
_NUMA_NODES = Path("sys/devices/system/node")
_PCI_DEVICES = Path("sys/bus/pci/devices")
_NVIDIA_GPUS = Path("proc/driver/nvidia/gpus")
_AMD_NODES = Path("sys/class/kfd/kfd/topology/nodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """A physical core: its usable hardware threads, as `sched_setaffinity` counts them, and its NUMA node."""

    cpus: tuple[int, ...]
    numa_node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTopology:
    """The physical cores that this process may use, by their first CPU, and where the accelerators are.

    `device_nodes` has the NUMA node of each visible accelerator, None if the kernel does not tell; `is_bound`
    says whether this process may use only a part of the machine's CPUs; `quota` is the CPU time, in cores,
    that its control group may use, None without a limit.
    """

    cores: tuple[Core, ...]
    device_nodes: tuple[int | None, ...] = ()
    is_bound: bool = False
    quota: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The properties of a host that a plan depends on.

    Attributes:
        accelerator: The kind of accelerator that torch would use, such as "cuda"; None if there is none.
        accelerator_count: The number of accelerators visible to this process.
        visible_devices: The value of the variable that restricts them, such as CUDA_VISIBLE_DEVICES; None if unset.
        num_ranks: The number of ranks of another launcher that started this process as a rank; 0 without one.
        cpu_topology: The cores to bind ranks to; None to bind none.
        tpus: The TPUs of the host, if these are its accelerators.
    """

    accelerator: str | None = None
    accelerator_count: int = 0
    visible_devices: str | None = None
    omp_num_threads: str | None = None
    num_ranks: int = 0
    cpu_topology: CpuTopology | None = None
    tpus: TpuHost | None = None


# The environment variable that restricts the devices visible to a process, by kind.
VISIBILITY_VARIABLES = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "hpu": "HABANA_VISIBLE_MODULES",
    "mlu": "MLU_VISIBLE_DEVICES",
}


def detect_host(device: str) -> Host:
    """Detect the accelerators of this host and the settings of its environment.

    torch is imported only if an accelerator's driver is loaded, or if the system cannot tell, so that a machine
    without accelerators never waits for the import. The device "auto" selects the best kind, "cpu" looks for none.
    """
    num_ranks = 0
    # Inherited variables are those of a parent process.
    if environ.read("RANK") is not None and environ.inherited_from() is None:
        size = environ.read("WORLD_SIZE") or ""
        num_ranks = int(size) if size.isdecimal() else 1
    host = Host(omp_num_threads=environ.read("OMP_NUM_THREADS"), num_ranks=num_ranks)
    if device == "cpu" or (device == "auto" and not accelerator_may_exist()):
        return host
    from drivetrain_state import best_device_kind, device_count

    kind = best_device_kind() if device == "auto" else device
    if kind == "cpu":
        return host
    variable = VISIBILITY_VARIABLES.get(kind)
    tpus = find_tpus() if kind == "tpu" else None
    if tpus is not None:
        said = {name: value for name in (ADDRESSES, HOSTS, TOPOLOGY) if (value := environ.read(name))}
        tpus = replace(tpus, given=said)
    return replace(
        host,
        accelerator=kind,
        accelerator_count=device_count(kind),
        visible_devices=None if variable is None else environ.read(variable),
        tpus=tpus,
    )


def accelerator_may_exist(dev: Path = Path("/dev")) -> bool:
    """Return whether the driver of any accelerator is loaded; True if the system cannot tell (not Linux)."""
    if not dev.is_dir() or not (dev / "null").exists() or not Path("/proc/self").exists():
        return True
    return any(next(dev.glob(pattern), None) is not None for pattern in _DEVICE_NODES)


def detect_cpu_topology(accelerator: str | None, *, visible: Sequence[str] = ()) -> CpuTopology:
    """Read the cores that this process may use, and the NUMA node of each visible accelerator.

    `visible` has the accelerators that ranks use, by number or UUID, in their order; empty for all. A LaunchError
    says that this system cannot bind a process to cores.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise LaunchError("--bind auto: this system cannot bind a process to cores (Linux can); leave it out")
    from drivetrain_launcher.plan.control_groups import read_group_limits  # few launches bind

    usable = os.sched_getaffinity(0)
    found = read_cpu_topology(Path("/"), usable=usable, accelerator=accelerator, visible=visible)
    return replace(found, quota=read_group_limits().cpus)


def read_cpu_topology(
    root: Path, *, usable: set[int], accelerator: str | None = None, visible: Sequence[str] = ()
) -> CpuTopology:
    """Read the kernel's description of the processors, in which only the `usable` CPUs count."""
    node_of = {
        cpu: int(folder.name.removeprefix("node"))
        for folder in sorted((root / _NUMA_NODES).glob("node[0-9]*"))
        for cpu in parse_cpu_list((folder / "cpulist").read_text())
    }
    cores: dict[tuple[int, ...], Core] = {}
    for cpu in sorted(usable):
        file = root / _CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        siblings = parse_cpu_list(file.read_text()) if file.exists() else (cpu,)
        threads = tuple(sibling for sibling in siblings if sibling in usable)
        cores.setdefault(siblings, Core(cpus=threads, numa_node=node_of.get(cpu, 0)))
    online = root / _CPUS / "online"
    num_online = len(parse_cpu_list(online.read_text())) if online.exists() else len(usable)
    device_nodes: tuple[int | None, ...] = ()
    if accelerator == "cuda":
        nodes = _nvidia_nodes(root) or _amd_nodes(root)
        names = visible or [name for name in nodes if name.isdigit()]
        device_nodes = tuple(nodes.get(name.strip()) for name in names)
    return CpuTopology(
        cores=tuple(cores.values()), device_nodes=device_nodes, is_bound=len(usable) < num_online
    )


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Return the numbers of a list as the kernel writes it, such as `0-3,8`."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


def format_cpu_list(cpus: Sequence[int]) -> str:
    """Return numbers as the kernel and `taskset` write them: `0-3,8`."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _nvidia_nodes(root: Path) -> Mapping[str, int | None]:
    """Return the NUMA node of NVIDIA's GPUs by number and by UUID.

    CUDA numbers equal GPUs in the order of their PCI addresses, by which the driver's folders are named. GPUs that
    the control group denies have folders too, but no number.
    """
    found: dict[str, int | None] = {}
    number = 0
    for folder in sorted((root / _NVIDIA_GPUS).glob("*")):
        lines = (folder / "information").read_text().splitlines()
        facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        with suppress(OSError):
            os.close(os.open(root / "dev" / f"nvidia{facts.get('Device Minor')}", os.O_RDWR | os.O_NONBLOCK))
            node = _pci_node(root, folder.name)
            found |= {str(number): node, facts.get("GPU UUID", ""): node}
            number += 1
    return found


def _amd_nodes(root: Path) -> Mapping[str, int | None]:
    """Return the NUMA node of AMD's GPUs by number; the driver's nodes without compute units are processors."""
    found: dict[str, int | None] = {}
    for folder in sorted((root / _AMD_NODES).glob("[0-9]*"), key=lambda folder: int(folder.name)):
        lines: list[str] = []
        with suppress(OSError):  # the control group denies it
            lines = (folder / "properties").read_text().splitlines()
        properties = {name: int(value) for name, value in (line.split() for line in lines)}
        if properties.get("simd_count", 0):
            location = properties["location_id"]
            bus, device = location >> 8, location >> 3 & 0x1F
            address = f"{properties.get('domain', 0):04x}:{bus:02x}:{device:02x}.{location & 7}"
            found[str(len(found))] = _pci_node(root, address)
    return found


def _pci_node(root: Path, address: str) -> int | None:
    file = root / _PCI_DEVICES / address.lower() / "numa_node"
    node = int(file.read_text()) if file.exists() else -1
    return node if node >= 0 else None
