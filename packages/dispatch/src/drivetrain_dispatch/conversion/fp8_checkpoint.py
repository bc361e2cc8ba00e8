"""Find the block-scaled fp8 weights of a checkpoint, and decide whether a model can keep them in fp8."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch

from drivetrain_dispatch.conversion.lazy_tensor import LazyTensor, TensorInFile
from drivetrain_dispatch.errors import WeightFilesError
from drivetrain_dispatch.quantization.block_scaled import BLOCK, FP8_DTYPES, dequantise, grid_of

_SUFFIX = "_scale_inv"  # appended to the name of a weight


class Fp8Weights(NamedTuple):
    """The fp8 weights of a checkpoint and their scales, by the names of the weights."""

    values: dict[str, LazyTensor]
    scales: dict[str, LazyTensor]


def fp8_weights(tensors: Mapping[str, LazyTensor], wanted: Collection[str]) -> Fp8Weights:
    """Find the fp8 weights with scales, `NAME_scale_inv`, except if the model itself has such a tensor."""
    found = Fp8Weights({}, {})
    for name, tensor in tensors.items():
        scales = tensors.get(f"{name}{_SUFFIX}")
        if tensor.dtype not in FP8_DTYPES or scales is None or f"{name}{_SUFFIX}" in wanted:
            continue
        if tensor.dim() < 2 or tuple(scales.shape) != grid_of(tensor.shape):
            raise WeightFilesError(
                f"{name!r} is fp8 of shape {tuple(tensor.shape)} and has scales of shape {tuple(scales.shape)}: it "
                f"needs one scale per block of {BLOCK} x {BLOCK} elements; load it by the library that wrote it"
            )
        found.values[name], found.scales[name] = tensor, scales
    lacking = [
        name for name, tensor in tensors.items() if tensor.dtype in FP8_DTYPES and name not in found.values
    ]
    if found.values and lacking:  # without any scales, the fp8 values themselves are the weights
        raise WeightFilesError(
            f"{lacking[0]!r} is fp8 and has no scales {lacking[0] + _SUFFIX!r}, unlike {len(found.values)} others: "
            "fetch the checkpoint again"
        )
    return found


def dequantised(tensors: Mapping[str, LazyTensor], fp8: Fp8Weights) -> dict[str, LazyTensor]:
    """Return a checkpoint's tensors without the scales; the weights that have scales are dequantised to fp32."""
    scales = {f"{name}{_SUFFIX}" for name in fp8.scales}
    return {
        name: LazyTensor.made_by(dequantise, tensor, fp8.scales[name]) if name in fp8.scales else tensor
        for name, tensor in tensors.items()
        if name not in scales
    }


def can_be_kept(values: LazyTensor, scales: LazyTensor) -> bool:
    """Return whether converted scales still match the blocks of the converted weight."""
    if values.dim() < 2 or tuple(scales.shape) != grid_of(values.shape):
        return False
    of_values, of_scales = _find_starts(values), _find_starts(scales)
    if of_values is None or of_scales is None or of_values.keys() != of_scales.keys():
        return False
    # Every part must begin at a block's boundary: two matrices of 64 rows would be one block with two scales.
    # A part that begins within a block follows a partial block with a scale of its own. The part's scale therefore
    # has a larger index than its row or column divided by 128.
    return all(
        of_scales[name] == (*outer, row // BLOCK, column // BLOCK)
        for name, (*outer, row, column) in of_values.items()
    )


def _find_starts(joined: LazyTensor) -> dict[str, tuple[int, ...]] | None:
    """Return where stored tensors begin in a joined tensor; None if it is not joined, or a part is transposed."""
    target = torch.empty(joined.shape, device="meta")
    places: dict[str, tuple[int, ...]] = {}
    for lazy, part in joined.parts(target):
        if not isinstance(lazy.origin, TensorInFile) or part.stride() != target.stride()[-part.dim() :]:
            return None
        coordinates, offset = list[int](), int(part.storage_offset())
        for stride in target.stride():
            index, offset = divmod(offset, stride)
            coordinates.append(index)
        places[lazy.origin.name.removesuffix(_SUFFIX)] = tuple(coordinates)
    return places
