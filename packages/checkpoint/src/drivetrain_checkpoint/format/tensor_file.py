"""The layout of safetensors files, and the bytes of their tensors.

The files are plain safetensors, which any reader of the format accepts. They are not written by the library's
`save_file`, for two reasons: each byte is copied off the device, hashed and written in one pass, and the offset of
each tensor is known before the file is written.
"""

import ctypes
import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

# The dtypes by their names in the format; older torch versions lack the newest.
_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, attribute)
    for name, attribute in {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "I8": "int8",
        "U64": "uint64",
        "U32": "uint32",
        "U16": "uint16",
        "U8": "uint8",
        "BOOL": "bool",
        "C64": "complex64",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F8_E8M0": "float8_e8m0fnu",
    }.items()
    if hasattr(torch, attribute)
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_HEADER_ALIGNMENT = 8


def is_storable(dtype: torch.dtype) -> bool:
    """Return whether the format has a name for `dtype`."""
    return dtype in _NAMES


def name_of_dtype(dtype: torch.dtype) -> str:
    """Return the name of a dtype in the format."""
    return _NAMES[dtype]


def dtype_of(name: str) -> torch.dtype | None:
    """Return the dtype with a name in the format; None if this torch does not have it."""
    return _DTYPES.get(name)


def item_bytes_of(name: str) -> int:
    """Return the element size, in bytes, of the dtype with a name in the format; 1 if this torch does not have it."""
    return _DTYPES[name].itemsize if name in _DTYPES else 1


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a file: its key, the name of its dtype in the format, and its shape."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """The size of the elements in bytes."""
        return prod(self.shape) * _DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The layout of a file, known before it is written.

    Attributes:
        header: The header, with which the file begins.
        order: The order of the tensors after the header, as indices into the planned entries.
        starts: The first byte of each planned entry in the file.
    """

    header: bytes
    order: tuple[int, ...]
    starts: tuple[int, ...]


def plan_file(entries: Sequence[TensorEntry]) -> FileLayout:
    """Return the layout of a file of tensors, whose keys must differ. Pure."""
    # Widest dtype first, as in the library: every tensor starts at a multiple of its item size.
    order = sorted(range(len(entries)), key=lambda index: -_DTYPES[entries[index].dtype].itemsize)
    described: dict[str, object] = {}
    starts = [0] * len(entries)
    offset = 0
    for index in order:
        entry = entries[index]
        starts[index], end = offset, offset + entry.size_bytes
        described[entry.key] = {
            "dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, end]
        }  # fmt: skip
        offset = end
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return FileLayout(header, tuple(order), tuple(start + len(header) for start in starts))


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a view of the bytes of a contiguous CPU tensor, which must outlive it; NumPy would refuse bfloat16."""
    size_bytes = tensor.numel() * tensor.element_size()
    if size_bytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size_bytes).from_address(tensor.data_ptr())).cast("B")
