"""The links between NVIDIA devices, as reported by the driver (through nvidia-ml-py, the extra `nvidia`)."""

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any, Literal

LinkType = Literal["nvlink", "pcie"]


def nvidia_link(uuids: Sequence[str]) -> LinkType | None:
    """Return the slowest link among devices with these UUIDs (`"GPU-..."`): NVLink only if each has an active one.

    None for a single device, or if `nvidia-ml-py` or the driver's library is missing.
    """
    if len(uuids) < 2 or importlib.util.find_spec("pynvml") is None:
        return None
    pynvml: Any = importlib.import_module("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # NVIDIA's management library (NVML) is missing, although torch has CUDA
        return None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        return "nvlink" if all(_has_nvlink(pynvml, handle) for handle in handles) else "pcie"
    finally:
        pynvml.nvmlShutdown()


def _has_nvlink(pynvml: Any, handle: object) -> bool:
    for link in range(int(pynvml.NVML_NVLINK_MAX_LINKS)):
        try:
            if pynvml.nvmlDeviceGetNvLinkState(handle, link):
                return True
        except pynvml.NVMLError:  # raised for indices past the device's last link
            return False
    return False
