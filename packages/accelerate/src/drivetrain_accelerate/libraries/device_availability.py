"""The kinds of devices that this process can compute on, and their dtypes."""

import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType

import torch

from drivetrain_accelerate.libraries.availability import (
    is_msamp_available,
    is_torch_version,
    is_torchao_available,
    is_transformer_engine_available,
)
from drivetrain_config import environ
from drivetrain_state.detect import device_module

USE_TORCH_XLA = True


def is_torch_distributed_available() -> bool:
    """Return whether torch was built with its collectives."""
    return torch.distributed.is_available()


def is_xccl_available() -> bool:
    """Return whether torch was built with the collectives of Intel GPUs."""
    return torch.distributed.is_available() and torch.distributed.is_xccl_available()


def is_cuda_available() -> bool:
    """Return whether there is a CUDA device, without initialising CUDA, so that processes can still be forked."""
    with environ.exported(PYTORCH_NVML_BASED_CUDA_CHECK="1"):
        return torch.cuda.is_available()


def is_rocm_available() -> bool:
    """Return whether torch was built for AMD's devices and there is one."""
    return torch.version.hip is not None and torch.cuda.is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return whether there is an Apple GPU, and torch is of this version or newer."""
    return is_torch_version(">=", min_version) and torch.backends.mps.is_available()


def _function_for(kind: str, device: str, library: str | None) -> Callable[..., bool]:
    def is_available(check_device: bool = False) -> bool:
        return _is_there(kind, library, check_device)

    is_available.__name__ = is_available.__qualname__ = f"is_{kind}_available"
    is_available.__doc__ = f"Return whether there is {device}; `check_device` computes on it."
    return is_available


is_mlu_available = _function_for("mlu", "a Cambricon MLU", "torch_mlu")
is_musa_available = _function_for("musa", "a Moore Threads GPU", "torch_musa")
is_npu_available = _function_for("npu", "an Ascend NPU", "torch_npu")
is_sdaa_available = _function_for("sdaa", "a Tecorigin SDAA device", "torch_sdaa")
is_xpu_available = _function_for("xpu", "an Intel GPU", None)
is_neuron_available = _function_for("neuron", "a Trainium device", "torch_neuronx")


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Return whether there is a Gaudi device; `init_hccl` loads its collectives too."""
    if not _is_there("hpu", "habana_frameworks", check_device=False):
        return False
    if init_hccl:
        importlib.import_module("habana_frameworks.torch.distributed.hccl")
    return True


def is_habana_gaudi1() -> bool:
    """Return whether the Gaudi device is one of the first generation."""
    module = device_module("hpu") if is_hpu_available() else None
    return module is not None and str(module.get_device_name()).upper() == "GAUDI"  # later ones add a number


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return whether torch_xla is installed; with `check_is_tpu` or `check_is_gpu`, for a device of that kind."""
    if check_is_tpu and check_is_gpu:
        raise ValueError("check_is_tpu=True, check_is_gpu=True: a device cannot be both; ask for one")
    if importlib.util.find_spec("torch_xla") is None:
        return False
    if not (check_is_tpu or check_is_gpu):
        return True
    runtime = importlib.import_module("torch_xla.runtime")
    return str(runtime.device_type()) in (("TPU",) if check_is_tpu else ("GPU", "CUDA"))


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether this process can compute in bfloat16; with `ignore_tpu`, a TPU does not count."""
    if is_torch_xla_available(check_is_tpu=True):
        return not ignore_tpu
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported()


def is_fp16_available() -> bool:
    """Return whether this process can compute in float16. All devices can, except the first Gaudi."""
    return not is_habana_gaudi1()


def is_fp8_available() -> bool:
    """Return whether a library that computes in fp8 is installed. drivetrain needs none besides torch."""
    return is_msamp_available() or is_transformer_engine_available() or is_torchao_available()


def _is_there(kind: str, library: str | None, check_device: bool) -> bool:
    """Return whether torch, with a vendor's library, finds a device of a kind."""
    if library is not None:
        if importlib.util.find_spec(library) is None:
            return False
        importlib.import_module(library)
    module: ModuleType | None = device_module(kind)
    if module is None or module.device_count() == 0:
        return False
    if check_device:
        try:
            torch.zeros(1, device=kind)
        except RuntimeError:
            return False
    return True
