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


def _modes(fp16: str, bf16: str, *, levels: tuple[Level, Level] = ("native", "native")) -> dict[str, Support]:
    return {"fp16": Support(level=levels[0], reason=fp16), "bf16": Support(level=levels[1], reason=bf16)}


# Device types whose models all support the same; CUDA devices and CPUs are queried individually below.
_BY_KIND: dict[str, dict[str, Support]] = {
    "xpu": _modes("Intel GPUs compute in fp16", "Intel GPUs compute in bf16"),
    "mps": _modes("Apple GPUs compute in fp16", "Apple GPUs compute in bf16 from macOS 14 on"),
    "npu": _modes("Ascend NPUs compute in fp16", "Ascend NPUs compute in bf16"),
    "mlu": _modes("Cambricon MLUs compute in fp16", "Cambricon MLUs compute in bf16"),
    "hpu": _modes("Gaudi trains in bf16", "Gaudi computes in bf16", levels=("none", "native")),
    "tpu": _modes("TPUs have no fp16 units", "TPUs compute in bf16", levels=("none", "native")),
    "xla": _modes(
        "not all devices of XLA compute in fp16", "XLA's devices compute in bf16", levels=("none", "native")
    ),
}
_AMPERE = (8, 0)
_VOLTA = (7, 0)


def supported_modes(device: torch.device) -> dict[str, Support]:
    """Return how well `device` supports each of "no" (fp32), "fp16" and "bf16", and why.

    Example:
        >>> supported_modes(torch.device("cpu"))["bf16"].level != "none"
        True
    """
    fp32 = Support(level="native", reason="fp32 is computed everywhere")
    if device.type == "cuda" and not torch.cuda.is_available():
        low = _modes(*["torch finds no CUDA device here"] * 2, levels=("none", "none"))
    elif device.type == "cuda":
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        if torch.version.hip is not None:
            low = _modes(*[f"{name} computes in it (ROCm)"] * 2)
        else:
            shown = f"{name} has compute capability {capability[0]}.{capability[1]}"
            fp16: Level = "native" if capability >= _VOLTA else "none"
            bf16: Level = "native" if capability >= _AMPERE else "none"
            low = _modes(f"{shown}; fp16 wants 7.0", f"{shown}; bf16 wants 8.0", levels=(fp16, bf16))
    elif device.type == "cpu":
        slow = "this processor has no {} units: correct, but slower than fp32"
        low = _modes(slow.format("fp16"), slow.format("bf16"), levels=("emulated", "emulated"))
        if has_bf16_units():
            low["bf16"] = Support(level="native", reason="this processor has bf16 instructions")
    elif device.type in _BY_KIND:
        low = _BY_KIND[device.type]
    else:
        low = _modes(
            *[f"nothing is known of devices of the kind {device.type!r}"] * 2, levels=("none", "none")
        )
    return {"no": fp32, **low}
