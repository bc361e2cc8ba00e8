"""The layout of safetensors files: the names of dtypes, the header, and where each tensor lies.

The files are plain safetensors, which any reader of the format accepts. The library's `save_file` does not write
them: a writer must choose the alignment of each tensor and know its offset before the file is written.
"""

import ctypes
import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drivetrain_weights.errors import WeightFilesError
from drivetrain_weights.regular_file import parse_json

DTYPES = {  # torch's dtypes by their names in the format
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT_BYTES = 64  # the alignment of torch's CPU allocator
_HEADER_ALIGNMENT_BYTES = 8
_METADATA = "__metadata__"
_PADDING = "__drivetrain_padding__/"


class TensorEntry(NamedTuple):
    """A tensor of a file: its key, the name of its dtype in the format, and its shape."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """The size of the elements in bytes."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The layout of a file, known before it is written.

    Attributes:
        header: The header, with which the file begins.
        order: The order of the tensors after the header, as indices into the planned entries.
        starts: The first byte of each planned entry in the file.
        size_bytes: The size of the file.
    """

    header: bytes
    order: tuple[int, ...]
    starts: tuple[int, ...]
    size_bytes: int


def plan_file(entries: Sequence[TensorEntry]) -> FileLayout:
    """Return the layout of a file that holds tensors without gaps. Their keys must differ. Pure."""
    # Widest dtype first, as in the library: every tensor starts at a multiple of its item size.
    order = sorted(range(len(entries)), key=lambda index: -DTYPES[entries[index].dtype].itemsize)
    return _layout(entries, order, {}, alignment_bytes=1)


def plan_aligned_file(entries: Sequence[TensorEntry]) -> FileLayout:
    """Return the layout of a file in which every tensor begins at a multiple of 64 bytes, in the given order. Pure.

    The format allows no gaps between tensors, so the padding is a tensor of bytes. Its name is reserved: no other
    tensor may have it.
    """
    for entry in entries:
        if is_padding(entry.key) or entry.key == _METADATA:
            raise WeightFilesError(f"{entry.key!r} is a reserved name in weight files: rename that module")
    about = {_METADATA: {"format": "pt"}}
    return _layout(entries, range(len(entries)), about, alignment_bytes=ALIGNMENT_BYTES)


def is_padding(key: str) -> bool:
    """Return whether a tensor of a file is padding before the next tensor. Pure."""
    return key.startswith(_PADDING)


def _layout(
    entries: Sequence[TensorEntry], order: Sequence[int], about: dict[str, Any], *, alignment_bytes: int
) -> FileLayout:
    described = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in about.items()]
    kinds: dict[tuple[str, tuple[int, ...]], tuple[str, int]] = {}  # by dtype and shape: most are of a few
    starts = [0] * len(entries)
    end = 0
    for index in order:
        entry = entries[index]
        kind = kinds.get(entry[1:])
        if kind is None:
            kind = kinds[entry[1:]] = (_kind_text(entry), entry.size_bytes)
        starts[index], end = end, end + kind[1]
        described.append(f'{json.dumps(entry.key)}: {{{kind[0]}, "data_offsets": [{starts[index]}, {end}]}}')
        if padding_bytes := -end % alignment_bytes:
            padding = TensorEntry(f"{_PADDING}{index}", "U8", (padding_bytes,))
            stop = end + padding_bytes
            described.append(f'"{padding.key}": {{{_kind_text(padding)}, "data_offsets": [{end}, {stop}]}}')
            end = stop
    text = f"{{{', '.join(described)}}}".encode()
    text += b" " * (-(8 + len(text)) % max(alignment_bytes, _HEADER_ALIGNMENT_BYTES))
    header = len(text).to_bytes(8, "little") + text
    return FileLayout(header, tuple(order), tuple(start + len(header) for start in starts), len(header) + end)


def _kind_text(entry: TensorEntry) -> str:
    return f'"dtype": {json.dumps(entry.dtype)}, "shape": {json.dumps(entry.shape)}'


class StoredEntry(NamedTuple):
    """A tensor in the header of an existing file; torch may lack its dtype."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StoredHeader:
    """The header of a file that exists: its tensors in the order of the file, without padding, and its strings."""

    entries: dict[str, StoredEntry]
    metadata: dict[str, str]


def read_header(path: Path) -> StoredHeader:
    """Read the header of a safetensors file, after `safetensors.safe_open` has checked all but repeated keys."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = parse_json(file.read(length), where=f"the header of {path}")
    metadata: dict[str, str] = header.pop(_METADATA, None) or {}
    entries: list[tuple[str, StoredEntry]] = []
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if not is_padding(name):
            stored = StoredEntry(entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin)
            entries.append((name, stored))
    return StoredHeader(dict(sorted(entries, key=lambda item: item[1].start)), metadata)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a view of a contiguous CPU tensor's memory. The tensor must outlive the view. NumPy lacks bfloat16."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
