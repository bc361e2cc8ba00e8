"""Write safetensors files in which every tensor begins at a multiple of 64 bytes, as tensors in memory do.

CPU kernels take other code paths for unaligned tensors, and round the last bit of a sum differently.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from drivetrain_weights.errors import WeightFilesError
from drivetrain_weights.safetensors_layout import (
    DTYPE_NAMES,
    FileLayout,
    TensorEntry,
    bytes_of,
    plan_aligned_file,
)


def write_aligned(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors to a safetensors file in their order, each at an offset that is a multiple of 64 bytes.

    Tensors that are not on the host, or not contiguous, are copied one at a time. Any reader of the format can read
    the file. Such a reader also sees the padding, which `is_padding` recognizes. An existing file is replaced.

    Raises:
        WeightFilesError: The format lacks a tensor's dtype, or a tensor's name is reserved.
    """
    layout = _plan(tensors)
    with path.open("wb") as file:
        file.write(layout.header)
        for start, tensor in zip(layout.starts, tensors.values(), strict=True):
            whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
            file.write(b"\0" * (start - file.tell()))
            file.write(bytes_of(whole))
        file.write(b"\0" * (layout.size_bytes - file.tell()))


def create_aligned(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Create an aligned file for tensors whose values are written later; return tensors over the file's pages.

    Writes to the returned tensors change the file, which begins with zeros. `tensors` may be on the meta device, as
    only their shapes and dtypes are used. The errors are those of `write_aligned`.
    """
    layout = _plan(tensors)
    with path.open("wb") as file:
        file.write(layout.header)
        # A full disk raises an error here instead of SIGBUS when pages are written.
        os.posix_fallocate(file.fileno(), 0, layout.size_bytes)
    pages = torch.from_file(str(path), shared=True, size=layout.size_bytes, dtype=torch.uint8)
    return {
        name: pages[start:][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, (name, tensor) in zip(layout.starts, tensors.items(), strict=True)
    }


def _plan(tensors: Mapping[str, Tensor]) -> FileLayout:
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise WeightFilesError(
                f"{name!r} is of {tensor.dtype}, which no safetensors file holds: keep it on 'cpu', or convert it"
            )
    return plan_aligned_file(
        [TensorEntry(name, DTYPE_NAMES[each.dtype], tuple(each.shape)) for name, each in tensors.items()]
    )
