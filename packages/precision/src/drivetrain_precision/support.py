"""A table of the precisions that each kind of device supports."""

from dataclasses import dataclass
from typing import Literal

import torch

from drivetrain_precision.compat import has_bf16_units

MODES = ("no", "fp16", "bf16")
Level = Literal["native", "emulated", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """The level of a device's support for a mode, and the reason for it.

    `native`: in hardware. `emulated`: correct, but slower than fp32; useful for tests. `none`: not supported.
    """

    level: Level
    reason: str


# Device types whose models all support the same; CUDA devices and CPUs are queried individually below.
_BY_KIND: dict[str, dict[str, Support]] = {
    "xpu": {
        "fp16": Support(level="native", reason="Intel GPUs compute in fp16"),
        "bf16": Support(level="native", reason="Intel GPUs compute in bf16"),
    },
    "mps": {
        "fp16": Support(level="native", reason="Apple GPUs compute in fp16"),
        "bf16": Support(level="native", reason="Apple GPUs compute in bf16 from macOS 14 on"),
    },
    "npu": {
        "fp16": Support(level="native", reason="Ascend NPUs compute in fp16"),
        "bf16": Support(level="native", reason="Ascend NPUs compute in bf16"),
    },
    "mlu": {
        "fp16": Support(level="native", reason="Cambricon MLUs compute in fp16"),
        "bf16": Support(level="native", reason="Cambricon MLUs compute in bf16"),
    },
    "hpu": {
        "fp16": Support(level="none", reason="Gaudi trains in bf16"),
        "bf16": Support(level="native", reason="Gaudi computes in bf16"),
    },
    "xla": {
        "fp16": Support(level="none", reason="TPUs have no fp16 units"),
        "bf16": Support(level="native", reason="TPUs compute in bf16"),
    },
}
_AMPERE = (8, 0)
_VOLTA = (7, 0)


def supported_modes(device: torch.device) -> dict[str, Support]:
    """Return how well `device` supports each of "no" (fp32), "fp16" and "bf16", and why."""
    fp32 = Support(level="native", reason="fp32 is computed everywhere")
    if device.type == "cuda" and not torch.cuda.is_available():
        absent = Support(level="none", reason="torch finds no CUDA device here")
        low = {"fp16": absent, "bf16": absent}
    elif device.type == "cuda":
        low = _cuda(torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))
    elif device.type == "cpu":
        low = _cpu()
    else:
        unknown = Support(level="none", reason=f"nothing is known of devices of the kind {device.type!r}")
        low = _BY_KIND.get(device.type, {"fp16": unknown, "bf16": unknown})
    return {"no": fp32, "fp16": low["fp16"], "bf16": low["bf16"]}


def _cuda(capability: tuple[int, int], name: str) -> dict[str, Support]:
    if torch.version.hip is not None:
        both = Support(level="native", reason=f"{name} computes in it (ROCm)")
        return {"fp16": both, "bf16": both}
    shown = f"{name} has compute capability {capability[0]}.{capability[1]}"
    return {
        "fp16": Support(
            level="native" if capability >= _VOLTA else "none", reason=f"{shown}; fp16 wants 7.0"
        ),
        "bf16": Support(
            level="native" if capability >= _AMPERE else "none", reason=f"{shown}; bf16 wants 8.0"
        ),
    }


def _cpu() -> dict[str, Support]:
    slow = "this processor has no {} units: correct, but slower than fp32"
    bf16 = (
        Support(level="native", reason="this processor has bf16 instructions")
        if has_bf16_units()
        else Support(level="emulated", reason=slow.format("bf16"))
    )
    return {"fp16": Support(level="emulated", reason=slow.format("fp16")), "bf16": bf16}
