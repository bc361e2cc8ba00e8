"""Convert NumPy arrays and scalars to tensors of bytes and back; imported only if a state holds any."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain_checkpoint.errors import CorruptCheckpointError

try:
    import numpy
except ImportError as error:
    raise ImportError(
        "this state holds NumPy values: install drivetrain-checkpoint[numpy] to read it"
    ) from error


def is_plain(dtype: "numpy.dtype[Any]") -> bool:
    """Return whether values of `dtype` are plain bytes: no Python objects, fields or subarrays."""
    return not dtype.hasobject and dtype.names is None and dtype.subdtype is None


def as_bytes_tensor(value: Any) -> Tensor:
    """Return the bytes of an array or scalar, in C order, as a 1-D uint8 tensor; without a copy where possible."""
    flat = numpy.require(value, requirements=["C", "W"]).reshape(-1)  # torch does not accept read-only memory
    if flat.size == 0 or flat.dtype.itemsize == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(flat.view(numpy.uint8), dtype=torch.uint8)


def from_bytes_tensor(bits: Tensor, *, dtype: str, shape: Sequence[int]) -> Any:
    """Convert a tensor of `as_bytes_tensor` back to an array, which shares the tensor's memory.

    Raises:
        CorruptCheckpointError: `dtype` is not a dtype of plain bytes; see `is_plain`.
    """
    kind = numpy.dtype(dtype)
    if not is_plain(kind):
        raise CorruptCheckpointError(f"the state names the NumPy dtype {dtype!r}, which is not plain bytes")
    if bits.numel() == 0:
        return numpy.zeros(tuple(shape), dtype=kind)
    return bits.numpy().view(kind).reshape(tuple(shape))
