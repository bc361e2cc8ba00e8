"""The fp8 weights with one scale per block of 128 x 128 elements, as in DeepSeek-V3's checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from drivetrain_dispatch.compat import TO_COPY, Args, Kwargs, Types, is_write, make_wrapper
from drivetrain_dispatch.errors import OffloadedError
from drivetrain_dispatch.model.nested_values import map_tensors

BLOCK = 128  # rows and columns of a block, in every published checkpoint of this format
FP8_DTYPES = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})


def grid_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a weight's scales: one scale per block of the last two dims, partial blocks included."""
    return (*shape[:-2], *(-(-size // BLOCK) for size in shape[-2:]))


def dequantise(values: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a dequantised weight: each block times its scale, computed in fp32.

    The values have the shape (..., rows, columns), the scales (..., ceil(rows / 128), ceil(columns / 128)).
    """
    rows, columns = values.shape[-2:]
    full = values.to(torch.float32)
    spread = scales.to(torch.float32).repeat_interleave(BLOCK, -1)[..., :columns]
    for index, start in enumerate(range(0, rows, BLOCK)):  # the scales are never expanded to the full shape
        full[..., start : start + BLOCK, :] *= spread[..., index : index + 1, :]
    return full.to(dtype)


class BlockScaledTensor(Tensor):
    """A weight in fp8 with its scales, in the shapes of `dequantise`; `dtype` is its compute dtype."""

    values: Tensor  # type: ignore[assignment] Tensor.values is a method of sparse tensors
    scales: Tensor

    @staticmethod
    def __new__(cls: type, values: Tensor, scales: Tensor, dtype: torch.dtype) -> "BlockScaledTensor":
        """Create the tensor around its two parts."""
        made = cast(
            "BlockScaledTensor",
            make_wrapper(cls, values.shape, dtype=dtype, device=values.device, requires_grad=False),
        )
        made.values, made.scales = values, scales
        return made

    def __init__(self, values: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"BlockScaledTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        """Return the names of the parts, and the dtype to rebuild the tensor with."""
        return ["values", "scales"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        parts: Mapping[str, Tensor], dtype: torch.dtype, size: object, stride: object
    ) -> "BlockScaledTensor":
        return BlockScaledTensor(parts["values"], parts["scales"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Types, args: Args = (), kwargs: Kwargs = None) -> Any:
        """Apply moves, copies and selections to the parts; dequantise for any other operation."""
        given = dict(kwargs or {})
        if is_write(func) and isinstance(args[0], BlockScaledTensor):
            raise OffloadedError(
                "a weight that is kept in fp8 cannot be written to: load the model without quantization=StoredFP8()"
            )
        if (change := _ON_PARTS.get(func)) is not None:
            made = change(*args, **given)
            if made is not None:
                return made
        return func(*map_tensors(args, _dequantise), **map_tensors(given, _dequantise))


def _change_parts(
    tensor: BlockScaledTensor,
    *,
    change: Callable[[Tensor], Tensor],
    dtype: torch.dtype | None = None,
    **_: object,
) -> BlockScaledTensor:
    """Return a weight with `change` applied to both parts; other options of the operation are ignored."""
    return BlockScaledTensor(change(tensor.values), change(tensor.scales), dtype or tensor.dtype)


def _move_parts(
    tensor: BlockScaledTensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **_: object,
) -> BlockScaledTensor:
    """Move both parts to a device; a new dtype changes only the compute dtype."""
    return _change_parts(
        tensor, change=lambda part: part.to(device, non_blocking=non_blocking, copy=True), dtype=dtype
    )


def _select_part(tensor: BlockScaledTensor, dim: int, index: int) -> BlockScaledTensor | None:
    """Select one matrix of a stack; return None if `dim` is a row or column dimension."""
    if dim % tensor.dim() >= tensor.dim() - 2:
        return None
    return _change_parts(tensor, change=lambda part: part.select(dim % tensor.dim(), index))


_ATEN: Any = torch.ops.aten
_ON_PARTS: dict[object, Callable[..., BlockScaledTensor | None]] = {
    _ATEN.detach.default: partial(_change_parts, change=Tensor.detach),
    _ATEN.alias.default: partial(_change_parts, change=Tensor.detach),
    _ATEN.clone.default: partial(_change_parts, change=Tensor.clone),
    TO_COPY: _move_parts,
    _ATEN.select.int: _select_part,
}


def _dequantise(tensor: Tensor) -> Tensor:
    is_kept = isinstance(tensor, BlockScaledTensor)
    return dequantise(tensor.values, tensor.scales, tensor.dtype) if is_kept else tensor
