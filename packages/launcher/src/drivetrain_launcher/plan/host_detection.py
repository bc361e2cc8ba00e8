"""The host as a plan needs it, with its number of accelerators, determined as cheaply as possible."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain_config import environ

if TYPE_CHECKING:
    from drivetrain_launcher.plan.cpu_topology import CpuTopology

# Drivers' files in /dev: NVIDIA (dxg in WSL), AMD, DRI (Intel and others), Google and Habana, Huawei, Cambricon.
_DEVICE_NODES = ("nvidia[0-9]*", "dxg", "kfd", "dri/renderD*", "accel*", "davinci[0-9]*", "cambricon_dev*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The properties of a host that a plan depends on.

    Attributes:
        accelerator: The kind of accelerator that torch would use, such as "cuda"; None if there is none.
        accelerator_count: The number of accelerators visible to this process.
        visible_devices: The value of the variable that restricts them, such as CUDA_VISIBLE_DEVICES; None if unset.
        omp_num_threads: The value of OMP_NUM_THREADS in the environment; None if unset.
        num_ranks: The number of ranks of another launcher that has started this process as one; 0 without one.
        cpu_topology: The cores to bind ranks to; None to bind none.
    """

    accelerator: str | None = None
    accelerator_count: int = 0
    visible_devices: str | None = None
    omp_num_threads: str | None = None
    num_ranks: int = 0
    cpu_topology: "CpuTopology | None" = None


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
    without accelerators never waits for the import.

    Args:
        device: The chosen kind of device: "auto" selects the best one, "cpu" looks for no accelerator.
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
    return replace(
        host,
        accelerator=kind,
        accelerator_count=device_count(kind),
        visible_devices=None if variable is None else environ.read(variable),
    )


def accelerator_may_exist(dev: Path = Path("/dev")) -> bool:
    """Return whether the driver of any accelerator is loaded; True if the system cannot tell (not Linux)."""
    if not dev.is_dir() or not (dev / "null").exists() or not Path("/proc/self").exists():
        return True
    return any(next(dev.glob(pattern), None) is not None for pattern in _DEVICE_NODES)
