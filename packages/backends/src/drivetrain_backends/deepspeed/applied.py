"""The values that an engine applies, read back from it."""

from types import MappingProxyType
from typing import Any

import torch

from drivetrain_backends.deepspeed.compat import accumulation_dtype, applied_zero
from drivetrain_backends.protocol import AutoValue
from drivetrain_backends.settings import DeepSpeedSettings

_DTYPES = MappingProxyType({torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"})


def read_back(engine: Any, settings: DeepSpeedSettings) -> dict[str, object]:
    """Return the section's fields as the engine has them; an `AutoValue` where the section left one open."""
    zero = applied_zero(engine)
    found: dict[str, object] = {
        "stage": int(engine.zero_optimization_stage()),
        "offload_optimizer": _device_of(zero.offload_optimizer),
        "offload_param": _device_of(zero.offload_param),
        "reduce_bucket_size": int(zero.reduce_bucket_size),
        "allgather_bucket_size": int(zero.allgather_bucket_size),
        "overlap_comm": bool(zero.overlap_comm),
        "grad_accum_dtype": accumulation_dtype(engine),
        "communication_data_type": reduction_dtype(engine),
        "config": engine.config,
    }
    reason = "of deepspeed.config" if settings.config is not None else "not said, so chosen for the run"
    left_open = {name for name in found if getattr(settings, name) is None} | {"config"}
    return {
        name: AutoValue(value=value, reason=reason if name != "config" else "filled in from the run")
        if name in left_open
        else value
        for name, value in found.items()
    }


def reduction_dtype(engine: Any) -> str:
    """Return the name of the dtype in which ranks add up gradients."""
    return _DTYPES.get(engine.communication_data_type, "as DeepSpeed chooses")


def _device_of(offload: Any) -> str:
    return "none" if offload is None else str(getattr(offload.device, "value", offload.device))
