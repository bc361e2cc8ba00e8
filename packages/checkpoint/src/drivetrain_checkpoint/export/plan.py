"""Which file of an export holds which tensor: pure, from names, shapes and dtypes alone."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from drivetrain_checkpoint.errors import StateError
from drivetrain_checkpoint.format.tensor_file import is_storable

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_FILE = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")

_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([A-Za-z]+)")
_UNITS = {"B": 1} | {
    f"{prefix}{kind}": base**power
    for kind, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT", start=1)
}


class Shaped(Protocol):
    """Anything with a shape and a dtype: a tensor, a part of one, or a description."""

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the whole tensor."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """What is known of a tensor before it is there.

    Attributes:
        shape: That of the whole tensor.
        dtype: Of its elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """What it takes in a file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPlan:
    """Which file holds which tensor.

    Attributes:
        files: The names of each file's tensors, by the file's name, in the order they are written.
        tensors: What each stored tensor is, by name.
        ties: The names that are not stored because another is the same tensor: name to stored name.
    """

    files: Mapping[str, tuple[str, ...]]
    tensors: Mapping[str, TensorInfo]
    ties: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def total_size(self) -> int:
        """The bytes of all stored tensors."""
        return sum(info.size_bytes for info in self.tensors.values())

    @property
    def weight_map(self) -> dict[str, str]:
        """The file of each stored tensor."""
        return {name: file for file, names in self.files.items() for name in names}

    @property
    def is_sharded(self) -> bool:
        """Whether there is more than one file, and so an index."""
        return len(self.files) > 1


def plan_export(
    tensors: Mapping[str, Shaped],
    *,
    max_shard_size: int | str = "5GB",
    ties: Mapping[str, str] | None = None,
) -> ExportPlan:
    """Plan an export: the files are filled in the order of the names.

    Args:
        tensors: What will be stored, by name: tensors, or descriptions of those that come later.
        max_shard_size: What the tensors of one file may take together, in bytes or as "5GB", "512MiB". A tensor above
            it gets a file of its own.
        ties: Names that are the same tensor as another: name to the name it is stored under.

    Raises:
        StateError: A tensor cannot be stored: its name, its dtype, or what it is a tie of.
        ValueError: No such size.
    """
    limit = parse_size(max_shard_size)
    ties = dict(ties or {})
    described = {name: _describe(name, tensor) for name, tensor in tensors.items()}
    for name, stored in ties.items():
        _check_tie(name, stored, described, ties)
    kept = {name: info for name, info in described.items() if name not in ties}
    shards: list[list[str]] = [[]]
    filled = 0
    for name, info in kept.items():
        if shards[-1] and filled + info.size_bytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += info.size_bytes
    return ExportPlan(
        files={_file_name(i, len(shards)): tuple(names) for i, names in enumerate(shards)},
        tensors=kept,
        ties=ties,
    )


def tied_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The names whose tensor is, element for element, the same memory as that of an earlier name.

    Views that overlap and differ are no ties.

    Returns:
        Name to the first name of the same memory.
    """
    first: dict[object, str] = {}
    ties: dict[str, str] = {}
    for name, tensor in tensors.items():
        if tensor.is_meta or tensor.layout != torch.strided or tensor.numel() == 0:
            continue
        memory = (
            tensor.device,
            tensor.data_ptr(),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )
        if (stored := first.setdefault(memory, name)) != name:
            ties[name] = stored
    return ties


def parse_size(size: int | str) -> int:
    """Bytes of a size such as 1000, "5GB" (powers of 1000) or "512MiB" (powers of 1024); the case is free.

    Raises:
        ValueError: It is no size above 0; the message says what is allowed.
    """
    size_bytes = 0
    if isinstance(size, str):
        match = _SIZE.fullmatch(size.strip())
        units = {unit.lower(): factor for unit, factor in _UNITS.items()}
        if match and match[2].lower() in units:
            size_bytes = int(float(match[1]) * units[match[2].lower()])
    elif type(size) is int:
        size_bytes = size
    if size_bytes < 1:
        raise ValueError(
            f"max_shard_size={size!r}: must be a number of bytes above 0, or one with a unit such as '5GB' or "
            f"'512MiB' (units: {', '.join(_UNITS)})"
        )
    return size_bytes


def _describe(name: object, tensor: Shaped) -> TensorInfo:
    if not isinstance(name, str) or name == "__metadata__":
        raise StateError(f"the name {name!r}: must be a string other than '__metadata__'; rename the tensor")
    if not isinstance(getattr(tensor, "dtype", None), torch.dtype):
        raise StateError(
            f"{name!r} is of type {type(tensor).__name__}; an export holds tensors only: leave it out, or save it "
            "with Checkpointer"
        )
    if not is_storable(tensor.dtype):
        raise StateError(f"{name!r} is of {tensor.dtype}, which safetensors has no name for; convert it")
    return TensorInfo(shape=tuple(tensor.shape), dtype=tensor.dtype)


def _check_tie(name: str, stored: str, described: Mapping[str, TensorInfo], ties: Mapping[str, str]) -> None:
    if name not in described or stored not in described or stored in ties:
        raise StateError(
            f"ties[{name!r}] = {stored!r}: both must be names of tensors, the second one that is stored itself"
        )
    if described[name] != described[stored]:
        raise StateError(
            f"ties[{name!r}] = {stored!r}: {described[name]} and {described[stored]} cannot be one tensor; leave the "
            "tie out"
        )


def _file_name(index: int, count: int) -> str:
    return SINGLE_FILE if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"
