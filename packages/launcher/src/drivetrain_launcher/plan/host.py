"""What a plan must know of this host: how many accelerators there are, asked as cheaply as it can be."""

from dataclasses import dataclass, replace
from pathlib import Path

from drivetrain_config import environ

# What drivers leave in /dev: NVIDIA, AMD, Intel and others behind DRI, Google's TPUs, Huawei, Habana, Cambricon.
_DEVICE_NODES = ("nvidia[0-9]*", "dxg", "kfd", "dri/renderD*", "accel*", "davinci[0-9]*", "cambricon_dev*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What a plan knows of the host it is made on.

    Attributes:
        accelerator: The kind of accelerator that torch would use, such as "cuda"; None if there is none.
        accelerator_count: How many of them are visible to this process.
        visible_devices: What the environment restricts them to, such as CUDA_VISIBLE_DEVICES; None if it does not.
        omp_num_threads: What OMP_NUM_THREADS is in the environment; None if it is not set.
        has_ranks: Whether another launcher has told this process its rank.
    """

    accelerator: str | None = None
    accelerator_count: int = 0
    visible_devices: str | None = None
    omp_num_threads: str | None = None
    has_ranks: bool = False


# The variable by which a driver is told which of its devices a process sees.
VISIBILITY_VARIABLES = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "hpu": "HABANA_VISIBLE_MODULES",
    "mlu": "MLU_VISIBLE_DEVICES",
}


def look_at_host(device: str) -> Host:
    """Find out what there is.

    torch is imported only where a driver has left its mark in /dev, or on a system that has no such marks: a run on
    a CPU alone never waits for it.

    Args:
        device: The kind of device that was chosen: "auto" takes the best, "cpu" asks for none.
    """
    host = Host(omp_num_threads=environ.read("OMP_NUM_THREADS"), has_ranks=environ.read("RANK") is not None)
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
    """Whether any driver of an accelerator is loaded; True where the system does not tell (not Linux)."""
    if not dev.is_dir() or not (dev / "null").exists() or not Path("/proc/self").exists():
        return True
    return any(next(dev.glob(pattern), None) is not None for pattern in _DEVICE_NODES)
