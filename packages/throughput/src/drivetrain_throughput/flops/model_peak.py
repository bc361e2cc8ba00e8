"""The peak of a device in the precision that a run computes in."""

import logging
from collections.abc import Sequence

import torch
from torch import nn

from drivetrain_throughput.device_peaks import peak_flops

logger = logging.getLogger(__name__)


def find_peak(device: torch.device, mode: str, models: Sequence[nn.Module], *, is_main: bool) -> float | None:
    """Return the peak of a device in FLOP/s in the precision that the models compute in, or None if it is unknown.

    Args:
        device: The device of the models.
        mode: The precision of the run, such as "bf16"; "no" goes by the models' parameters.
        models: The prepared models of the run.
        is_main: Whether to tell that the peak is unknown.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    precision = mode if mode in ("bf16", "fp16") else _own_precision(models)
    found = peak_flops(name, precision)
    if found is None and is_main:
        level = logging.INFO if device.type == "cpu" else logging.WARNING
        logger.log(
            level,
            "throughput/mfu is left out: the peak of %s in %s is in no table; give it as tracking.peak_flops, in "
            "FLOP/s of one device",
            name,
            precision,
        )
    return found


def _own_precision(models: Sequence[nn.Module]) -> str:
    dtypes = [parameter.dtype for model in models for parameter in model.parameters()]
    if dtypes and all(dtype in (torch.bfloat16, torch.float16) for dtype in dtypes):
        return "bf16" if dtypes[0] == torch.bfloat16 else "fp16"
    return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
