"""Checkpoints whose weights are fp8 with one scale for each block, as DeepSeek-V3 is published."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from drivetrain_dispatch.errors import WeightFilesError
from drivetrain_dispatch.lazy_tensor import LazyTensor

_SCALE = "_scale_inv"  # what is added to the name of a weight
_BLOCK = 128  # rows and columns of a block, in every checkpoint that was published so
_FP8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})


def dequantised(tensors: Mapping[str, LazyTensor], wanted: Collection[str]) -> dict[str, LazyTensor]:
    """Replace each fp8 weight and its scales by the weight in full precision.

    Args:
        tensors: The checkpoint's, by name. The scales of `NAME` are called `NAME_scale_inv`.
        wanted: Names that the model has: scales that are among them stay.

    Returns:
        The same without scales; fp32 where there were any.

    Raises:
        WeightFilesError: The number of scales is not that of the weight's blocks.
    """
    scaled = {
        name: f"{name}{_SCALE}"
        for name, tensor in tensors.items()
        if tensor.dtype in _FP8 and f"{name}{_SCALE}" in tensors and f"{name}{_SCALE}" not in wanted
    }
    scales = set(scaled.values())
    return {
        name: _dequantised(name, tensor, tensors[scaled[name]]) if name in scaled else tensor
        for name, tensor in tensors.items()
        if name not in scales
    }


def _dequantised(name: str, weight: LazyTensor, scales: LazyTensor) -> LazyTensor:
    shape, grid = tuple(weight.shape), tuple(scales.shape)
    if len(shape) != 2 or grid != tuple(-(-size // _BLOCK) for size in shape):
        raise WeightFilesError(
            f"{name!r} is fp8 of shape {shape} and has scales of shape {grid}: must be one for a block of {_BLOCK} "
            f"x {_BLOCK} elements; load such a checkpoint by the library that wrote it"
        )
    return LazyTensor.made_by(dequantise, weight, scales)


def dequantise(weight: Tensor, scales: Tensor) -> Tensor:
    """Return a weight in fp32: each block times its scale; blocks at the edges may be smaller.

    Args:
        weight: Of shape (rows, columns), fp8.
        scales: Of shape (ceil(rows / 128), ceil(columns / 128)).
    """
    rows, columns = weight.shape
    full = weight.to(torch.float32)
    spread = scales.to(torch.float32).repeat_interleave(_BLOCK, 1)[:, :columns]
    for start in range(0, rows, _BLOCK):  # by rows of blocks: the scales are never held at the weight's size
        full[start : start + _BLOCK] *= spread[start // _BLOCK]
    return full
