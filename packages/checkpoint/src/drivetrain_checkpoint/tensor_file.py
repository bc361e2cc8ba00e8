"""Tensors to and from safetensors files, streamed.

The files are plain safetensors: any reader of that format takes them. They are written here rather than by the
library's `save_file` so that each byte is touched once: copied off the device tensor by tensor, hashed and written
in the same pass, in memory bounded by the largest tensor. The library's parser checks the header of what is read.
"""

import ctypes
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drivetrain_checkpoint.errors import CorruptCheckpointError
from drivetrain_checkpoint.files import HashedReader, HashedWriter

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


def write_tensors(writer: HashedWriter, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file.

    Args:
        writer: Where to.
        tensors: Dense tensors of any device and strides, by name; `"__metadata__"` is none the format allows.
    """
    # Widest first, as the library does it: every tensor starts at a multiple of its item size.
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header: dict[str, object] = {}
    offset = 0
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    writer.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        staged = tensors[name].detach().resolve_conj().resolve_neg().cpu().contiguous()
        writer.write(_bytes_of(staged))


def read_tensors(reader: HashedReader, path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, on the CPU, each in memory of its own.

    The last block is not checked before `reader.finish()`.

    Raises:
        CorruptCheckpointError: The file is no safetensors file.
    """
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as header:
            for name in header.offset_keys():
                described = header.get_slice(name)
                if (dtype := _DTYPES.get(described.get_dtype())) is None:
                    raise CorruptCheckpointError(
                        f"{path}: {name!r} has the dtype {described.get_dtype()}, which this torch does not have"
                    )
                tensors[name] = torch.empty(described.get_shape(), dtype=dtype)
    except SafetensorError as error:
        raise CorruptCheckpointError(f"{path} is no safetensors file: {error}") from error
    header_bytes = int.from_bytes(reader.read(8), "little")
    reader.read(header_bytes)
    for tensor in tensors.values():
        reader.read_into(_bytes_of(tensor))
    return tensors


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, which must outlive the view; without NumPy, which knows no bfloat16."""
    size_bytes = tensor.numel() * tensor.element_size()
    if size_bytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size_bytes).from_address(tensor.data_ptr()))
