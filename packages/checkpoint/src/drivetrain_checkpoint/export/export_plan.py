"""Plan which file of an export holds which tensor, from names, shapes and dtypes alone. Pure."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from drivetrain_checkpoint.errors import StateError
from drivetrain_checkpoint.export.shard_size import parse_shard_size
from drivetrain_weights.safetensors_layout import DTYPE_NAMES

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_FILE = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")


class Shaped(Protocol):
    """An object with a shape and a dtype: a tensor, a shard, or a description."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """The description of a tensor.

    Attributes:
        shape: The shape of the whole tensor.
        dtype: The dtype of the elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """The size of the tensor in a file, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPlan:
    """The plan of which file holds which tensor.

    Attributes:
        files: The names of the tensors in each file, by file name, in the order in which they are written.
        tensors: The description of each stored tensor, by name.
        ties: The names that are not stored because they share the tensor of another name: name to stored name.
    """

    files: Mapping[str, tuple[str, ...]]
    tensors: Mapping[str, TensorInfo]
    ties: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def total_size(self) -> int:
        """The size of all stored tensors in bytes."""
        return sum(info.size_bytes for info in self.tensors.values())

    @property
    def weight_map(self) -> dict[str, str]:
        """The file name of each stored tensor."""
        return {name: file for file, names in self.files.items() for name in names}

    @property
    def is_sharded(self) -> bool:
        """True if the export has more than one file, and therefore an index."""
        return len(self.files) > 1


def plan_export(
    tensors: Mapping[str, Shaped], *, max_shard_size: int | str = "5GB", ties: Mapping[str, str] | None = None
) -> ExportPlan:
    """Plan an export; files are filled in the order of `tensors`.

    Args:
        tensors: The tensors to store, by name, or descriptions of them.
        max_shard_size: The largest total size of the tensors in one file, in bytes or as "5GB", "512MiB". A larger
            tensor gets a file of its own.
        ties: The names that share the tensor of another name: name to stored name.

    Raises:
        StateError: A tensor cannot be stored, because of its name, its dtype or its tie.
        ValueError: The size is invalid.

    Example:
        >>> state = {"a": torch.ones(256), "b": torch.ones(256)}
        >>> list(plan_export(state, max_shard_size="1KiB").files)
        ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    limit = parse_shard_size(max_shard_size)
    ties = dict(ties or {})
    described = {name: _describe(name, tensor) for name, tensor in tensors.items()}
    for name, stored in ties.items():
        if name not in described or stored not in described or stored in ties:
            raise StateError(
                f"ties[{name!r}] = {stored!r}: both must be names of tensors, the second one that is stored itself"
            )
        if described[name] != described[stored]:
            raise StateError(
                f"ties[{name!r}] = {stored!r}: {described[name]} and {described[stored]} cannot be one tensor; "
                "leave the tie out"
            )
    kept = {name: info for name, info in described.items() if name not in ties}
    shards: list[list[str]] = [[]]
    filled = 0
    for name, info in kept.items():
        if shards[-1] and filled + info.size_bytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += info.size_bytes
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    files = dict(zip(names if len(shards) > 1 else [SINGLE_FILE], map(tuple, shards), strict=True))
    return ExportPlan(files=files, tensors=kept, ties=ties)


def _describe(name: object, tensor: Shaped) -> TensorInfo:
    if not isinstance(name, str) or name == "__metadata__":
        raise StateError(f"the name {name!r}: must be a string other than '__metadata__'; rename the tensor")
    if not isinstance(getattr(tensor, "dtype", None), torch.dtype):
        raise StateError(
            f"{name!r} is of type {type(tensor).__name__}; an export holds tensors only: leave it out, or save it "
            "with Checkpointer"
        )
    if tensor.dtype not in DTYPE_NAMES:
        raise StateError(f"{name!r} is of {tensor.dtype}, which safetensors has no name for; convert it")
    return TensorInfo(shape=tuple(tensor.shape), dtype=tensor.dtype)
