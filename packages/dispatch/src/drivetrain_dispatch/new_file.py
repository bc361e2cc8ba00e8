"""A safetensors file that is made first and filled afterwards, through its pages."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip


def create_file(path: Path, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Tensor]:
    """Create a safetensors file of the size that tensors need, and return them as its pages.

    What is written to them is written to the file. Their values are zeros until then.

    Args:
        path: The file; replaced if it is there.
        tensors: The shape and dtype of each, by name.

    Raises:
        OSError: The disk has no room.
    """
    # Large elements first: each begins at a multiple of its size.
    names = sorted(tensors, key=lambda name: (-tensors[name][1].itemsize, name))
    header: dict[str, Any] = {}
    starts: dict[str, int] = {}
    end = 0
    for name in names:
        shape, dtype = tensors[name]
        starts[name], size = end, torch.Size(shape).numel() * dtype.itemsize
        end += size
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [starts[name], end]}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    begin = 8 + len(text)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if end:
            os.posix_fallocate(file.fileno(), begin, end)
    pages = torch.from_file(str(path), shared=True, size=begin + end, dtype=torch.uint8)
    made: dict[str, Tensor] = {}
    for name in names:
        shape, dtype = tensors[name]
        size = torch.Size(shape).numel() * dtype.itemsize
        made[name] = pages[begin + starts[name] :][:size].view(dtype).view(shape)
    return made
