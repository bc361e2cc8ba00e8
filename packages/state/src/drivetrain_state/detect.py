"""The devices of this machine and the dtypes they support, queried only when a function is called."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, cast

import torch

from drivetrain_messages import format_size
from drivetrain_state.device_links import LinkType, nvidia_link

DeviceKind = Literal["cuda", "rocm", "xpu", "mps", "npu", "hpu", "mlu", "xla", "cpu"]

# In order of preference; torch calls AMD's devices cuda too.
_MODULES = ("cuda", "xpu", "npu", "hpu", "mlu", "mps")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCapability:
    """The narrow dtypes that a device trains in, with dedicated units or with kernels that save time or memory.

    Attributes:
        fp16: Whether it supports float16.
        bf16: Whether it supports bfloat16.
        fp8: Whether it supports the 8-bit float formats in matrix multiplications.
    """

    fp16: bool
    bf16: bool
    fp8: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """The devices of one kind on this machine.

    Attributes:
        kind: The kind of the devices; rocm for AMD devices, which torch calls cuda.
        count: The number of devices visible to this process.
        names: The driver's name of each device.
        memory_bytes: The memory of each device in bytes; empty if the driver does not report it.
        ability: The dtypes that the first device supports.
        link: The link between the devices, if the driver reports it.
    """

    kind: DeviceKind
    count: int
    names: tuple[str, ...] = ()
    memory_bytes: tuple[int, ...] = ()
    ability: DeviceCapability
    link: LinkType | None = None


# Kinds whose devices all support the same dtypes; those of cuda and rocm differ by generation.
_ABILITIES: Mapping[str, DeviceCapability] = {
    "cpu": DeviceCapability(fp16=True, bf16=True, fp8=False),
    "mps": DeviceCapability(fp16=True, bf16=True, fp8=False),
    "xpu": DeviceCapability(fp16=True, bf16=True, fp8=False),
    "npu": DeviceCapability(fp16=True, bf16=True, fp8=False),
    "hpu": DeviceCapability(fp16=True, bf16=True, fp8=True),
    "mlu": DeviceCapability(fp16=True, bf16=True, fp8=False),
    "xla": DeviceCapability(fp16=False, bf16=True, fp8=False),
}
# The first CUDA compute capability, and the AMD architectures, with units for a dtype.
_CUDA_SINCE = {"fp16": (7, 0), "bf16": (8, 0), "fp8": (8, 9)}
_ROCM_BF16 = ("gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
_ROCM_FP8 = ("gfx94", "gfx95", "gfx12")


def cuda_ability(capability: tuple[int, int]) -> DeviceCapability:
    """Return the dtypes that NVIDIA devices of this compute capability support."""
    return DeviceCapability(**{name: capability >= since for name, since in _CUDA_SINCE.items()})


def rocm_ability(architecture: str) -> DeviceCapability:
    """Return the dtypes that AMD devices of this architecture, such as `"gfx942"`, support."""
    return DeviceCapability(
        fp16=True, bf16=architecture.startswith(_ROCM_BF16), fp8=architecture.startswith(_ROCM_FP8)
    )


def capabilities(device: torch.device | str) -> DeviceCapability:
    """Return the narrow dtypes that `device` supports; the driver reports the generation of a CUDA or ROCm device.

    Raises:
        ValueError: For an unknown kind of device.
    """
    device = torch.device(device)
    if device.type == "cuda":
        if torch.version.hip is not None:
            return rocm_ability(str(torch.cuda.get_device_properties(device).gcnArchName))
        return cuda_ability(torch.cuda.get_device_capability(device))
    if device.type not in _ABILITIES:
        raise ValueError(f"device={str(device)!r}: known kinds are cuda, {', '.join(sorted(_ABILITIES))}")
    return _ABILITIES[device.type]


def device_module(kind: str) -> ModuleType | None:
    """Return the torch module of a kind of accelerator, such as `torch.cuda`, or None if none is available."""
    module = getattr(torch, kind, None)
    if kind == "mps":
        return module if torch.backends.mps.is_available() else None
    return module if module is not None and module.is_available() else None


def device_count(kind: str) -> int:
    """Return the number of devices of torch's `kind` visible to this process; 1 for the CPU."""
    if kind == "cpu":
        return 1
    if kind == "xla":
        return _xla_count()
    module = device_module(kind)
    return int(module.device_count()) if module is not None else 0


def best_device_kind() -> str:
    """Return the torch device type that `"auto"` selects: the available accelerator, else the CPU."""
    for kind in _MODULES:
        if device_count(kind):
            return kind
    return "xla" if importlib.util.find_spec("torch_xla") and _xla_kind() != "CPU" else "cpu"


def detect_devices() -> tuple[DeviceGroup, ...]:
    """Return the devices of this machine by kind: the kind that `"auto"` selects first, the CPU last."""
    found = [_accelerators(kind, count) for kind in _MODULES if (count := device_count(kind))]
    if importlib.util.find_spec("torch_xla") and (count := _xla_count()):
        found.append(
            DeviceGroup(kind="xla", count=count, names=(_xla_kind(),) * count, ability=_ABILITIES["xla"])
        )
    return (*found, DeviceGroup(kind="cpu", count=1, ability=_ABILITIES["cpu"]))


def describe_environment() -> str:
    """Return a text that lists the devices of this machine, one line per kind."""
    return "\n".join(_line(group) for group in detect_devices())


def _line(group: DeviceGroup) -> str:
    can = [name for name in ("fp16", "bf16", "fp8") if getattr(group.ability, name)]
    parts = [f"{group.kind} x {group.count}", *dict.fromkeys(group.names)]
    parts += [format_size(size) for size in dict.fromkeys(group.memory_bytes)]
    parts += [" ".join(can), *([group.link] if group.link else [])]
    return ", ".join(parts)


def _accelerators(kind: str, count: int) -> DeviceGroup:
    sizes = [_memory_bytes(kind, index) for index in range(count)]
    is_rocm = kind == "cuda" and torch.version.hip is not None
    return DeviceGroup(
        kind=cast("DeviceKind", "rocm" if is_rocm else kind),
        count=count,
        names=tuple(_name(kind, index) for index in range(count)),
        memory_bytes=tuple(size for size in sizes if size is not None),
        ability=capabilities(torch.device(kind, 0)),
        link=nvidia_link(_cuda_uuids(count)) if kind == "cuda" and not is_rocm else None,
    )


def _name(kind: str, index: int) -> str:
    ask = getattr(device_module(kind), "get_device_name", None)
    return str(ask(index)) if ask is not None else kind


def _memory_bytes(kind: str, index: int) -> int | None:
    if kind == "mps":
        return int(torch.mps.recommended_max_memory())
    ask = getattr(device_module(kind), "get_device_properties", None)
    return getattr(ask(index), "total_memory", None) if ask is not None else None


def _cuda_uuids(count: int) -> list[str]:
    return [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(count)]


def _xla_runtime() -> Any:
    if importlib.util.find_spec("torch_xla") is None:
        return None
    return importlib.import_module("torch_xla.runtime")


def _xla_count() -> int:
    runtime = _xla_runtime()
    return int(runtime.addressable_device_count()) if runtime is not None else 0


def _xla_kind() -> str:
    runtime = _xla_runtime()
    return str(runtime.device_type()) if runtime is not None else ""
