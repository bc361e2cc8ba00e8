"""The devices of this machine and the dtypes they support, queried only when a function is called."""

import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, cast

import torch

from drivetrain_config import environ
from drivetrain_messages import format_size
from drivetrain_state.errors import DeviceError

LinkType = Literal["nvlink", "pcie"]
DeviceKind = Literal["cuda", "rocm", "xpu", "mps", "npu", "hpu", "mlu", "tpu", "xla", "cpu"]

# In order of preference; torch calls AMD's devices cuda too.
_MODULES = ("cuda", "xpu", "npu", "hpu", "mlu", "tpu", "mps")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCapability:
    """The formats that a device trains in: float16, bfloat16 and, in matrix products, 8-bit floats.

    A dtype counts if dedicated units, or kernels that save time or memory, support it.
    """

    fp16: bool
    bf16: bool
    fp8: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """The devices of one kind on this machine.

    Attributes:
        kind: The kind of the devices; rocm for AMD devices, which torch calls cuda.
        memory_bytes: The memory of each device; empty if the driver does not report it.
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
    **dict.fromkeys(("cpu", "mps", "xpu", "npu", "mlu"), DeviceCapability(fp16=True, bf16=True, fp8=False)),
    "hpu": DeviceCapability(fp16=True, bf16=True, fp8=True),
    **dict.fromkeys(("tpu", "xla"), DeviceCapability(fp16=False, bf16=True, fp8=False)),
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
    """Return the narrow dtypes that `device` supports; ValueError for an unknown kind of device."""
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
        return _count_xla()
    module = device_module(kind)
    return int(module.device_count()) if module is not None else 0


def best_device_kind() -> str:
    """Return the torch device type that `"auto"` selects: the available accelerator, else the CPU."""
    for kind in _MODULES:
        if device_count(kind):
            return kind
    runtime = _xla_runtime()
    return "xla" if runtime is not None and str(runtime.device_type()) != "CPU" else "cpu"


def detect_devices() -> tuple[DeviceGroup, ...]:
    """Return the devices of this machine by kind: the kind that `"auto"` selects first, the CPU last."""
    found: list[DeviceGroup] = []
    for kind in _MODULES:
        if not (count := device_count(kind)):
            continue
        module: Any = device_module(kind)
        properties: list[Any] = []
        if hasattr(module, "get_device_properties"):
            properties = [module.get_device_properties(index) for index in range(count)]
        sizes = [getattr(each, "total_memory", None) for each in properties]
        if kind == "mps":
            sizes = [int(torch.mps.recommended_max_memory())] * count
        is_named = hasattr(module, "get_device_name")
        is_rocm = kind == "cuda" and torch.version.hip is not None
        group = DeviceGroup(
            kind=cast("DeviceKind", "rocm" if is_rocm else kind),
            count=count,
            names=tuple(str(module.get_device_name(index)) if is_named else kind for index in range(count)),
            memory_bytes=tuple(size for size in sizes if size is not None),
            ability=capabilities(torch.device(kind, 0)),
            link=nvidia_link([f"GPU-{each.uuid}" for each in properties if kind == "cuda" and not is_rocm]),
        )
        found.append(group)
    if count := device_count("xla"):
        names = (str(_xla_runtime().device_type()),) * count
        found.append(DeviceGroup(kind="xla", count=count, names=names, ability=_ABILITIES["xla"]))
    return (*found, DeviceGroup(kind="cpu", count=1, ability=_ABILITIES["cpu"]))


def describe_environment() -> str:
    """Return a text that lists the devices of this machine, one line per kind."""
    lines: list[str] = []
    for group in detect_devices():
        dtypes = [name for name in ("fp16", "bf16", "fp8") if getattr(group.ability, name)]
        sizes = [format_size(size) for size in dict.fromkeys(group.memory_bytes)]
        parts = [f"{group.kind} x {group.count}", *dict.fromkeys(group.names), *sizes, " ".join(dtypes)]
        lines.append(", ".join([*parts, group.link] if group.link else parts))
    return "\n".join(lines)


def _xla_runtime() -> Any:
    """Return torch-xla's runtime; None if torch-xla is not installed, DeviceError if it does not load."""
    if importlib.util.find_spec("torch_xla") is None:
        return None
    try:
        return importlib.import_module("torch_xla.runtime")
    except ImportError as error:  # its extension is compiled for exactly one version of torch
        raise DeviceError(
            f"torch-xla is installed and does not load with torch {torch.__version__}: {error}. torch-xla 2.9 works "
            "with torch 2.9 alone: pip install 'torch==2.9.*' 'torch-xla==2.9.*', or uninstall torch-xla"
        ) from error


def _count_xla() -> int:
    """Return the number of XLA devices of this process; DeviceError if the one that PJRT_DEVICE names is missing."""
    if (runtime := _xla_runtime()) is None:
        return 0
    said = environ.read("CPU_NUM_DEVICES")
    if said is not None and not (
        said.isascii() and said.isdecimal() and int(said)
    ):  # torch-xla 2.9 would crash
        raise DeviceError(f"CPU_NUM_DEVICES={said}: must be a number of devices from 1 on, such as 4")
    try:
        # Not `addressable_device_count`, after which a process can no longer begin SPMD.
        return int(runtime.addressable_runtime_device_count())
    except (OSError, RuntimeError) as error:
        raise DeviceError(
            f"device='xla': PJRT_DEVICE={environ.read('PJRT_DEVICE')}, and torch-xla finds no such device: {error}. "
            "PJRT_DEVICE=CPU computes on the processor"
        ) from error


def nvidia_link(uuids: Sequence[str]) -> LinkType | None:
    """Return the slowest link among devices with these UUIDs (`"GPU-..."`): NVLink only if all have an active NVLink.

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
        for uuid in uuids:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            links = 0
            with suppress(pynvml.NVMLError):  # raised for indices past the device's last link
                for index in range(int(pynvml.NVML_NVLINK_MAX_LINKS)):
                    links += bool(pynvml.nvmlDeviceGetNvLinkState(handle, index))
            if not links:
                return "pcie"
        return "nvlink"
    finally:
        pynvml.nvmlShutdown()
