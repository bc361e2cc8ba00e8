"""Write safetensors files in which every tensor begins at a multiple of 64 bytes, as tensors in memory do.

CPU kernels take other code paths for unaligned tensors, and round the last bit of a sum differently. The format
allows no gaps between tensors, so padding is a tensor of bytes with a reserved name.
"""

import ctypes
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from drivetrain_dispatch.errors import WeightFilesError

ALIGNMENT_BYTES = 64  # the alignment of torch's CPU allocator
_PADDING = "__drivetrain_padding__/"
DTYPES = {  # torch dtypes by their names in safetensors' headers
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}


def is_padding(name: str) -> bool:
    """Return whether a tensor of a file is padding before the next tensor. Pure."""
    return name.startswith(_PADDING)


def write_aligned(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors to a safetensors file in their order, each at an offset that is a multiple of 64 bytes.

    Tensors that are not on the host, or not contiguous, are copied one at a time. Any reader of the format can read
    the file; it also sees the padding, which `is_padding` recognises.

    Args:
        tensors: The tensors by name.
        path: The file to write; an existing file is replaced.

    Raises:
        WeightFilesError: The format lacks a tensor's dtype, or a tensor's name is reserved.
        OSError: The file could not be written.
    """
    header = _header(tensors)
    with path.open("wb") as file:
        file.write(header)
        for tensor in tensors.values():
            whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
            file.write(bytes_of(whole))
            file.write(b"\0" * _missing(whole.nbytes))


def create_aligned(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Create an aligned file for tensors whose values are written later, and return the tensors as its pages.

    Writes to the returned tensors go to the file; until then the values are zeros.

    Args:
        tensors: The tensors by name. Only shapes and dtypes are used, so tensors on the meta device suffice.
        path: The file to create; an existing file is replaced.

    Raises:
        WeightFilesError: The format lacks a tensor's dtype, or a tensor's name is reserved.
        OSError: The disk has too little room.
    """
    header = _header(tensors)
    starts: dict[str, int] = {}
    end = len(header)
    for name, tensor in tensors.items():
        starts[name] = end
        end += tensor.nbytes + _missing(tensor.nbytes)
    with path.open("wb") as file:
        file.write(header)
        # A full disk raises an error here instead of SIGBUS when pages are written.
        os.posix_fallocate(file.fileno(), 0, end)
    pages = torch.from_file(str(path), shared=True, size=end, dtype=torch.uint8)
    return {
        name: pages[starts[name] :][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for name, tensor in tensors.items()
    }


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a view of the memory of a contiguous CPU tensor, which must outlive it. NumPy would lack bfloat16."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the header of a file, padded with spaces. Pure."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for number, (name, tensor) in enumerate(tensors.items()):
        if tensor.dtype not in DTYPES:
            raise WeightFilesError(
                f"{name!r} is of {tensor.dtype}, which no safetensors file holds: keep it on 'cpu', or convert it"
            )
        if is_padding(name) or name in entries:
            raise WeightFilesError(f"{name!r} is a reserved name in weight files: rename that module")
        entries[name] = _entry(DTYPES[tensor.dtype], list(tensor.shape), end, tensor.nbytes)
        end += tensor.nbytes
        if filled := _missing(end):
            entries[f"{_PADDING}{number}"] = _entry("U8", [filled], end, filled)
            end += filled
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * _missing(8 + len(text))
    return len(text).to_bytes(8, "little") + text


def _entry(dtype: str, shape: list[int], begin: int, size_bytes: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + size_bytes]}


def _missing(size_bytes: int) -> int:
    """Return the bytes of padding up to the next aligned offset."""
    return -size_bytes % ALIGNMENT_BYTES
