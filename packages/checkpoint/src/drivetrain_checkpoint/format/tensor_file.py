"""The safetensors format: which tensors a file holds and where, and their bytes.

The files are plain safetensors: any reader of that format takes them. They are written here rather than by the
library's `save_file` so that each byte is touched once: copied off the device, hashed and written in the same pass;
and so that it is known beforehand where in a file each tensor will lie.
"""

import ctypes
import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

# What the format calls each dtype; torch versions lack some of the newest.
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
    """Whether the format has a name for `dtype`."""
    return dtype in _NAMES


def name_of_dtype(dtype: torch.dtype) -> str:
    """What the format calls a dtype."""
    return _NAMES[dtype]


def dtype_of(name: str) -> torch.dtype | None:
    """The dtype that the format calls so; None if this torch does not have it."""
    return _DTYPES.get(name)


def item_bytes_of(name: str) -> int:
    """The bytes of an element of the dtype that the format calls so; 1 where this torch does not have it."""
    return _DTYPES[name].itemsize if name in _DTYPES else 1


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file: its key, its dtype as the format calls it, and its shape."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Of its elements."""
        return prod(self.shape) * _DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class FileLayout:
    """A file before it is written.

    Attributes:
        header: Its first bytes.
        order: In which order the tensors follow, as indices into the entries it was planned for.
        starts: The first byte of each, by the same indices.
    """

    header: bytes
    order: tuple[int, ...]
    starts: tuple[int, ...]


def plan_file(entries: Sequence[Entry]) -> FileLayout:
    """The layout of a file of these tensors, whose keys differ. Pure."""
    # Widest first, as the library does it: every tensor starts at a multiple of its item size.
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
    """The memory of a contiguous CPU tensor, which must outlive the view; without NumPy, which knows no bfloat16."""
    size_bytes = tensor.numel() * tensor.element_size()
    if size_bytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size_bytes).from_address(tensor.data_ptr())).cast("B")
