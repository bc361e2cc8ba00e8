"""Safetensors files in which every tensor begins at a multiple of 64 bytes, as tensors in memory do.

The host's kernels take other paths for what begins elsewhere, and round the last bit of a sum in another way. The
format has no holes between tensors: what is left up to the next multiple is a tensor of bytes with a name of its own.
"""

import ctypes
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from drivetrain_dispatch.errors import WeightFilesError

ALIGNMENT_BYTES = 64  # what torch's own allocator gives
_PADDING = "__drivetrain_padding__/"
DTYPES = {  # those that safetensors has a name for
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
    """Whether a tensor of a file only fills it up to where the next one begins. Pure."""
    return name.startswith(_PADDING)


def write_aligned(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors to a safetensors file, in their order, each at a multiple of 64 bytes from the file's begin.

    One that is not on the host, or not contiguous, is copied alone. Any reader of the format reads the file; it also
    shows the tensors that fill it up, which `is_padding` tells.

    Args:
        tensors: By name.
        path: Where; a file that is there is replaced.

    Raises:
        WeightFilesError: A tensor is of a dtype that the format does not have, or has a name that is not free.
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
    """Create such a file for tensors whose values come later, and return them as its pages.

    What is written to them is written to the file; until then they are zeros.

    Args:
        tensors: By name. Shapes and dtypes alone are looked at: those of the meta device will do.
        path: The file; one that is there is replaced.

    Raises:
        WeightFilesError: A tensor is of a dtype that the format does not have, or has a name that is not free.
        OSError: The disk has no room.
    """
    header = _header(tensors)
    starts: dict[str, int] = {}
    end = len(header)
    for name, tensor in tensors.items():
        starts[name] = end
        end += tensor.nbytes + _missing(tensor.nbytes)
    with path.open("wb") as file:
        file.write(header)
        os.posix_fallocate(
            file.fileno(), 0, end
        )  # a full disk is told here, not by a signal when pages are written
    pages = torch.from_file(str(path), shared=True, size=end, dtype=torch.uint8)
    return {
        name: pages[starts[name] :][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for name, tensor in tensors.items()
    }


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, which must outlive the view; without NumPy, which knows no bfloat16."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    """What stands before the tensors, filled up with spaces. Pure."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for number, (name, tensor) in enumerate(tensors.items()):
        if tensor.dtype not in DTYPES:
            raise WeightFilesError(
                f"{name!r} is of {tensor.dtype}, which no safetensors file holds: keep it on 'cpu', or convert it"
            )
        if is_padding(name) or name in entries:
            raise WeightFilesError(f"{name!r} is no free name in a file of weights: rename that module")
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
    """How many bytes are left up to the next multiple."""
    return -size_bytes % ALIGNMENT_BYTES
