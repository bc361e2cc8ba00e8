"""Checkpoints with fp8 weights and a scale for each block: which they are, and whether they can be kept so."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from drivetrain_dispatch.conversion.lazy_tensor import LazyTensor, TensorInFile
from drivetrain_dispatch.errors import WeightFilesError
from drivetrain_dispatch.quantization.block_scaled import BLOCK, FP8_DTYPES, dequantise, grid_of

_SUFFIX = "_scale_inv"  # what is added to the name of a weight


class Fp8Weights(NamedTuple):
    """The fp8 weights of a checkpoint and their scales, by the names of the weights."""

    values: dict[str, LazyTensor]
    scales: dict[str, LazyTensor]


def fp8_weights(tensors: Mapping[str, LazyTensor], wanted: Collection[str]) -> Fp8Weights:
    """Find the fp8 weights that have scales.

    Args:
        tensors: The checkpoint's, by name. The scales of `NAME` are called `NAME_scale_inv`.
        wanted: Names that the model has: scales that are among them are the model's own.

    Raises:
        WeightFilesError: The number of scales is not that of the weight's blocks, or some weights alone have none.
    """
    found = Fp8Weights({}, {})
    for name, tensor in tensors.items():
        scales = tensors.get(f"{name}{_SUFFIX}")
        if tensor.dtype not in FP8_DTYPES or scales is None or f"{name}{_SUFFIX}" in wanted:
            continue
        if tensor.dim() < 2 or tuple(scales.shape) != grid_of(tensor.shape):
            raise WeightFilesError(
                f"{name!r} is fp8 of shape {tuple(tensor.shape)} and has scales of shape {tuple(scales.shape)}: must "
                f"be one for a block of {BLOCK} x {BLOCK} elements; load it by the library that wrote it"
            )
        found.values[name], found.scales[name] = tensor, scales
    lacking = [
        name for name, tensor in tensors.items() if tensor.dtype in FP8_DTYPES and name not in found.values
    ]
    if found.values and lacking:  # where none has scales, they are numbers of their own
        raise WeightFilesError(
            f"{lacking[0]!r} is fp8 and has no scales {lacking[0] + _SUFFIX!r}, as {len(found.values)} others have: "
            "fetch the checkpoint again"
        )
    return found


def dequantised(tensors: Mapping[str, LazyTensor], fp8: Fp8Weights) -> dict[str, LazyTensor]:
    """Return the tensors of a checkpoint without scales: weights that have any are in fp32."""
    scales = {f"{name}{_SUFFIX}" for name in fp8.scales}
    return {
        name: LazyTensor.made_by(dequantise, tensor, fp8.scales[name]) if name in fp8.scales else tensor
        for name, tensor in tensors.items()
        if name not in scales
    }


def can_be_kept(values: LazyTensor, scales: LazyTensor) -> bool:
    """Return whether scales that were converted as their weights were are those of the blocks of what these became.

    They are if every tensor that a weight is joined from begins at a block: two matrices of 64 rows, one upon the
    other, are one block with two scales.

    Args:
        values: A weight of the model, made of a checkpoint's fp8 weights.
        scales: The same, made of their scales.
    """
    if values.dim() < 2 or tuple(scales.shape) != grid_of(values.shape):
        return False
    of_values, of_scales = _places(values), _places(scales)
    if of_values is None or of_scales is None or of_values.keys() != of_scales.keys():
        return False
    # A part that begins within a block follows a cut one, whose scale counts as a whole: its own scale lies further
    # along than its row or column divided by 128.
    return all(
        of_scales[name] == (*outer, row // BLOCK, column // BLOCK)
        for name, (*outer, row, column) in of_values.items()
    )


def _places(joined: LazyTensor) -> dict[str, tuple[int, ...]] | None:
    """Return where in a tensor each tensor of files begins that it is joined from, by the name of the weight.

    None if it is made in another way, or if one of them is transposed.
    """
    target = torch.empty(joined.shape, device="meta")
    places: dict[str, tuple[int, ...]] = {}
    for lazy, part in joined.parts(target):
        if not isinstance(lazy.origin, TensorInFile) or part.stride() != target.stride()[-part.dim() :]:
            return None
        places[lazy.origin.name.removesuffix(_SUFFIX)] = _coordinates(target, int(part.storage_offset()))
    return places


def _coordinates(target: Tensor, offset: int) -> tuple[int, ...]:
    found: list[int] = []
    for stride in target.stride():
        index, offset = divmod(offset, stride)
        found.append(index)
    return tuple(found)
