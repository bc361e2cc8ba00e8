"""The generations of GPUs, and whether a device can run a recipe."""

from dataclasses import dataclass

import torch

from drivetrain_precision.fp8.protocol import Requirements
from drivetrain_precision.support import Support


@dataclass(frozen=True, slots=True)
class GPUGeneration:
    """The GPUs that compute a format, and their lowest compute capability."""

    name: str
    capability: tuple[int, int]


ADA = GPUGeneration("an Ada, Hopper or newer GPU", (8, 9))
HOPPER = GPUGeneration("a Hopper or newer GPU", (9, 0))
BLACKWELL = GPUGeneration("a Blackwell or newer GPU", (10, 0))


def check_hardware(needed: Requirements, device: torch.device, *, emulates: bool) -> Support:
    """Return a device's support for a recipe with an installed library; `emulates`: whether it runs on a CPU."""
    if device.type == "cpu" and emulates:
        return Support(
            level="emulated", reason="a CPU computes it by products in fp32: right, but slower than bf16"
        )
    if device.type != "cuda":
        return Support(level="none", reason=f"it needs {needed.hardware}, and the device is {device}")
    if torch.version.hip is not None:
        return Support(level="none", reason="ROCm is not tried yet; it needs CUDA")
    return check_capability(
        needed, torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
    )


def check_capability(needed: Requirements, found: tuple[int, int], name: str) -> Support:
    """Return whether the CUDA device of this name and compute capability can run a recipe."""
    shown = f"{name} has compute capability {found[0]}.{found[1]}"
    if found < needed.capability:
        least = ".".join(map(str, needed.capability))
        return Support(level="none", reason=f"it needs {needed.hardware} ({least}), and {shown}")
    return Support(level="native", reason=shown)
