"""The storages behind tensors: what really takes memory, however many tensors look at it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.nn.parameter import is_lazy

from drivetrain_memory.compat import coo_parts


@dataclass(frozen=True, slots=True)
class StorageKey:
    """The identity of a storage while it lives."""

    device: str
    address: int


@dataclass(frozen=True, slots=True)
class StorageSize:
    """A storage and the bytes that it takes."""

    key: StorageKey
    size_bytes: int


def storages_of(tensor: torch.Tensor) -> Iterator[StorageSize]:
    """Yield the storages of a tensor: one for a plain tensor, several for one that is made of others.

    A DTensor has the storage of its local shard, a quantised tensor those of its parts. A tensor without memory, such
    as one on the meta device, has none.
    """
    local = getattr(tensor, "to_local", None)
    if callable(local):  # a DTensor; its wrapper has no storage of its own
        with torch.no_grad():
            tensor = cast("torch.Tensor", local())
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if callable(flatten):
        names: Any = flatten()
        for name in names[0]:
            part = getattr(tensor, name)
            if isinstance(part, torch.Tensor):
                yield from storages_of(part)
        return
    if tensor.layout is not torch.strided:
        for part in _parts_of_sparse(tensor):
            yield from storages_of(part)
        return
    # A lazy parameter has no values before its first forward.
    if tensor.device.type == "meta" or is_lazy(tensor):
        return
    storage = tensor.untyped_storage()
    if size_bytes := storage.nbytes():
        yield StorageSize(StorageKey(str(tensor.device), storage.data_ptr()), size_bytes)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested mappings, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in list(value.values()):  # another thread may be adding to it
            yield from tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in list(value):
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
