"""Facts of this host and its processes: devices, drivers, ranks, cores, free ports, kernel."""

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from logging import getLogger

import torch
from packaging.version import InvalidVersion, parse

from drivetrain_accelerate.environment_variables import get_int_from_env, parse_flag_from_env
from drivetrain_accelerate.plugins.enums import DistributedType
from drivetrain_launcher.plan.core_binding import plan_bindings
from drivetrain_launcher.plan.host_detection import detect_cpu_topology
from drivetrain_state import best_device_kind

logger = getLogger(__name__)

_LOCAL_SIZES = "LOCAL_WORLD_SIZE MPI_LOCALNRANKS OMPI_COMM_WORLD_LOCAL_SIZE MV2_COMM_WORLD_LOCAL_SIZE"
# By field, the variables of torchrun, Intel MPI, Open MPI and MVAPICH.
_VARIABLES = {
    "rank": "RANK PMI_RANK OMPI_COMM_WORLD_RANK MV2_COMM_WORLD_RANK",
    "world_size": "WORLD_SIZE PMI_SIZE OMPI_COMM_WORLD_SIZE MV2_COMM_WORLD_SIZE",
    "local_rank": "LOCAL_RANK MPI_LOCALRANKID OMPI_COMM_WORLD_LOCAL_RANK MV2_COMM_WORLD_LOCAL_RANK",
    "local_world_size": _LOCAL_SIZES,
}
_DEFAULT_PORT = 29500
_OLDEST_KERNEL = "5.5.0"


@dataclass
class CPUInformation:
    """The rank of a process among the processes that train on CPUs."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Return the ranks that torchrun, Intel MPI, Open MPI or MVAPICH sets in the environment."""
    alone = asdict(CPUInformation())
    return CPUInformation(
        **{field: get_int_from_env(names.split(), alone[field]) for field, names in _VARIABLES.items()}
    )


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return the given modules that are imported."""
    return [name for name in library_names if name in sys.modules]


def get_current_device_type() -> tuple[str, str]:
    """Return the kind of accelerator and the name of its `DistributedType`; without one, those of CUDA."""
    kind = best_device_kind()
    kind = "cuda" if kind in ("cpu", "mps") else kind
    name = "MULTI_GPU" if kind == "cuda" else f"MULTI_{kind.upper()}"
    return kind, DistributedType.XLA.value if kind == "xla" else name


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names and the number of NVIDIA GPUs. nvidia-smi lists them, so CUDA is not initialised."""
    names = _ask_driver("name")
    return names, len(names)


def get_driver_version() -> str:
    """Return the version of NVIDIA's driver."""
    return _ask_driver("driver_version")[0]


def _ask_driver(field: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [line.strip() for line in text.splitlines() if line.strip()]


def check_cuda_p2p_ib_support() -> bool:
    """Return whether the GPUs can read each other: RTX 40 cards cannot before driver 550."""
    try:
        names, count = get_gpu_info()
        is_new = parse(get_driver_version()) >= parse("550.40.07")
    except (FileNotFoundError, subprocess.CalledProcessError, InvalidVersion):
        return True
    return count < 2 or is_new or not any("RTX 40" in name for name in names)


def check_cuda_fp8_capability() -> bool:
    """Return whether the CUDA device has units for fp8."""
    return torch.cuda.get_device_capability() >= (8, 9)


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to cores of its GPU's NUMA node, and log them; without such a node, do nothing.

    `verbose=None` leaves the logging to ACCELERATE_DEBUG_MODE.
    """
    if not torch.cuda.is_available() or not hasattr(os, "sched_setaffinity"):
        return
    topology = detect_cpu_topology("rocm" if torch.version.hip else "cuda")
    count = max(get_int_from_env(_LOCAL_SIZES.split(), 1), local_process_index + 1)
    binding = plan_bindings(topology, count)[local_process_index]
    os.sched_setaffinity(0, binding.cpus)
    if parse_flag_from_env("ACCELERATE_DEBUG_MODE") if verbose is None else verbose:
        logger.info("local rank %s runs on the cores %s", local_process_index, binding)


def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to cores of its GPU's NUMA node, unless the launcher or an earlier call did so."""
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < (os.cpu_count() or 1):
        return
    override_numa_affinity(local_process_index, verbose)


def is_port_in_use(port: int | None = None) -> bool:
    """Return whether something on this host listens on a port, by default 29500."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", _DEFAULT_PORT if port is None else port)) == 0


def get_free_port() -> int:
    """Return a port that nothing listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def check_os_kernel() -> None:
    """Warn of a Linux kernel before 5.5, on which processes of torch were seen to hang."""
    if platform.system() != "Linux":
        return
    release: Sequence[str] = platform.release().split("-")[0].split(".")[:3]
    number = ".".join("".join(digit for digit in part if digit.isdigit()) or "0" for part in release)
    if parse(number) < parse(_OLDEST_KERNEL):
        logger.warning(
            "Linux %s is older than %s: processes may hang; use a newer one", number, _OLDEST_KERNEL
        )
