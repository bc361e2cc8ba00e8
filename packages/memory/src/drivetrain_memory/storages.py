"""The storages behind tensors: the memory itself, which several tensors may share."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.nn.parameter import is_lazy

from drivetrain_memory.compat import coo_parts


@dataclass(frozen=True, slots=True)
class LiveStorage:
    """A key of a live storage; equality ignores the size, which may change."""

    device: str
    address: int
    size_bytes: int = field(compare=False)


def storage_of(tensor: torch.Tensor) -> LiveStorage | None:
    """Return the storage of a tensor; None for a tensor without values of its own, such as a meta or sparse one."""
    # A lazy parameter has no values before its first forward.
    if tensor.is_meta or tensor.layout is not torch.strided or is_lazy(tensor):
        return None
    try:
        storage = tensor.untyped_storage()
        return LiveStorage(str(tensor.device), storage.data_ptr(), storage.nbytes())
    except RuntimeError:  # a functional or fake tensor
        return None


def storages_of(tensor: torch.Tensor) -> Iterator[LiveStorage]:
    """Yield the storages of a tensor: one for a plain tensor, several for a tensor made of other tensors.

    A DTensor has the storage of its local shard, a quantised tensor the storages of its parts.
    """
    local = getattr(tensor, "to_local", None)
    if callable(local):  # a DTensor; its wrapper has no storage of its own
        with torch.no_grad():
            tensor = cast("torch.Tensor", local())
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if callable(flatten):
        names: Any = flatten()
        parts = [getattr(tensor, name) for name in names[0]]
    elif tensor.layout is torch.strided:
        if (storage := storage_of(tensor)) is not None and storage.size_bytes:
            yield storage
        return
    else:
        parts = _parts_of_sparse(tensor)
    for part in parts:
        if isinstance(part, torch.Tensor):
            yield from storages_of(part)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested mappings, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        held = value.values() if isinstance(value, Mapping) else value
        for each in list(held):  # another thread may be adding to it
            yield from tensors_in(each)


def _parts_of_sparse(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    detached = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return coo_parts(detached)
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return detached.crow_indices(), detached.col_indices(), detached.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return detached.ccol_indices(), detached.row_indices(), detached.values()
    return ()
