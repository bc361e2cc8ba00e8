"""Optimizer states that are made of several tensors, such as codes and scales, in a form that any rank can load.

Low-bit optimizers keep a state as a traceable tensor subclass (torch's `__tensor_flatten__`). Its plain form is

```text
{"tensor_class": "module:Class", "shape": whole shape, "context": [what the class is rebuilt with],
 "shaped": [names of parts of the tensor's own shape], "block_size": elements in a block,
 "parts": {name: elements, flat},         divided among ranks like the flat tensor
 "shared": {name: tensor}}                the same for all blocks, such as a table of values
```

A tensor quantised by blocks has a `block_size`, and allows a view and slices of whole blocks. A slice of one block
tells how many elements of each part belong to a block. Other tensors are stored whole, with all parts in "shared".
"""

import sys
from collections.abc import Mapping
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from drivetrain_backends.state_dict.dtensor import local, sharded_like
from drivetrain_weights import box_of_dtensor
from drivetrain_weights.tensor_box import is_dtensor

_CLASS = "tensor_class"
# The shape in a stored context, where a rank puts the shape of its own shard.
_SHAPE = "tensor_shape"


class BlockPart:
    """A part of a sharded state: each rank holds a range of its `size` elements, in the order of the flat tensor."""

    def __init__(self, tensor: Any, elements: Tensor, *, start: int, size: int) -> None:
        self.shape = torch.Size((size,))
        self.dtype = elements.dtype
        self._tensor, self._elements, self._start = tensor, elements, start

    def flat_range(self) -> tuple[int, Tensor]:
        """Return the index of this rank's first element, and this rank's elements, of shape (n,)."""
        return self._start, self._elements

    def full_tensor(self) -> Tensor:
        """Return all elements, of shape (size,), on the CPU. Called on all ranks."""
        pieces = {self._start: self._elements.cpu()}
        for axis, placement in enumerate(self._tensor.placements):
            if placement.is_shard():
                group = self._tensor.device_mesh.get_group(axis)
                gathered: list[Any] = [None] * dist.get_world_size(group)
                dist.all_gather_object(gathered, pieces, group=group)
                pieces = {start: piece for each in gathered for start, piece in each.items()}
        return torch.cat([pieces[start] for start in sorted(pieces)])


def has_parts(value: object) -> bool:
    """Return whether a value is a tensor made of several tensors; False for a DTensor, whatever its shard is."""
    return (
        isinstance(value, Tensor)
        and hasattr(value, "__tensor_flatten__")
        and hasattr(type(value), "__tensor_unflatten__")
        and not is_dtensor(value)
    )


def as_stored(value: Any) -> Any:
    """Convert tensors that are made of several tensors to the plain form. `value` may be a container of tensors.

    A sharded tensor is returned unchanged if its shard is not a range of whole blocks.
    """
    if type(value) is Tensor:
        return value
    if has_parts(value):
        return _store(value, value)
    if is_dtensor(value):
        if not has_parts(shard := local(value)):
            return value
        (block_size, _), span = _layout(shard), _span(value)
        is_divisible = block_size and span is not None and not any(end % block_size for end in span)
        return _store(shard, value) if is_divisible else value
    if type(value) is dict:
        return {key: as_stored(one) for key, one in cast("dict[Any, Any]", value).items()}
    if type(value) in (list, tuple):
        return type(value)(as_stored(one) for one in cast("list[Any]", value))
    return value


@torch.no_grad()
def _store(tensor: Any, whole: Any) -> dict[str, Any]:
    """Return the plain form of a tensor, which is `whole` or its local shard: a range of whole blocks."""
    names, context = tensor.__tensor_flatten__()
    block_size, per_block = _layout(tensor)
    start, _ = _span(whole) or (0, 0)
    parts: dict[str, Any] = {}
    for name, count in per_block.items():
        part = getattr(tensor, name).detach().reshape(-1)
        if whole is not tensor:
            size = whole.numel() // block_size * count
            part = BlockPart(whole, part, start=start // block_size * count, size=size)
        parts[name] = part
    return {
        _CLASS: f"{type(tensor).__module__}:{type(tensor).__qualname__}",
        "shape": whole.shape,
        "context": [_SHAPE if isinstance(one, tuple) and one == tensor.shape else one for one in context],
        "shaped": [name for name in names if getattr(tensor, name).shape == tensor.shape],
        "block_size": block_size,
        "parts": parts,
        "shared": {name: getattr(tensor, name).detach() for name in names if name not in parts},
    }


def _layout(tensor: Any) -> tuple[int, Mapping[str, int]]:
    """Return the number of elements in a block, 0 if unknown, and of each divided part's elements in a block."""
    names, _ = tensor.__tensor_flatten__()
    block_size = getattr(tensor, "block_size", 0)
    whole = {name: getattr(tensor, name).numel() for name in names}
    if not isinstance(block_size, int) or not 0 < block_size < tensor.numel() or tensor.numel() % block_size:
        return 0, {}
    block = tensor.detach().view(-1)[:block_size]
    counts = {name: getattr(block, name).numel() for name in names}
    divided = {name: count for name, count in counts.items() if count != whole[name]}
    num_blocks = tensor.numel() // block_size
    if any(count * num_blocks != whole[name] for name, count in divided.items()):
        return 0, {}
    return block_size, divided


def _span(tensor: Tensor) -> tuple[int, int] | None:
    """Return the range of elements that this rank holds, in row-major order; None if the elements form no range."""
    if not is_dtensor(tensor):
        return 0, tensor.numel()
    return box_of_dtensor(tensor).flat_range(tensor.shape)


def is_stored(value: object) -> bool:
    """Return whether a value is the plain form of a tensor made of several."""
    return isinstance(value, Mapping) and _CLASS in value


class Restored:
    """Restores an optimizer's states from the plain form, and counts the states that changed their form."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._packages = {kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__}
        # States of which a new shard would cut a block: their values are kept in floating point.
        self.num_cut = 0
        self.num_foreign = 0  # states of a class that the optimizer's own library does not have: likewise

    def restore(self, value: Any, parameter: Tensor | None) -> Any:
        """Return a value of a state with plain forms restored; a value of the parameter's shape is sharded alike."""
        if is_stored(value):
            return self._tensor(value, parameter)
        if type(value) is dict:
            return {key: self.restore(one, parameter) for key, one in cast("dict[Any, Any]", value).items()}
        if type(value) in (list, tuple):
            return type(value)(self.restore(one, parameter) for one in cast("list[Any]", value))
        return value

    def notes(self) -> list[str]:
        """Return messages for the user about the states that changed their form."""
        notes: list[str] = []
        if self.num_cut:
            notes.append(
                f"{self.num_cut} states are kept in floating point now, with the values they had: the shards of this "
                "number of ranks would cut their blocks"
            )
        if self.num_foreign:
            notes.append(
                f"{self.num_foreign} states of another library's optimizer were dequantised into floating point"
            )
        return notes

    def _tensor(self, stored: Mapping[str, Any], parameter: Tensor | None) -> Tensor:
        like = parameter if parameter is not None and parameter.shape == stored["shape"] else None
        span = (0, prod(stored["shape"])) if like is None else _span(like)
        shape = torch.Size(stored["shape"]) if like is None else local(like).shape
        block_size = stored["block_size"]
        is_foreign = stored[_CLASS].partition(".")[0] not in self._packages
        is_cut = not block_size and is_dtensor(like)
        is_empty = span is not None and span[0] == span[1]
        if block_size:
            is_cut = span is None or is_empty or any(end % block_size for end in span)
        self.num_foreign += is_foreign
        self.num_cut += is_cut and not is_foreign and not is_empty
        value = (
            _values(stored, like) if is_foreign or is_cut or span is None else _rebuilt(stored, shape, span)
        )
        return value if like is None else _shard_like(value, like)


def as_values(value: Any) -> Any:
    """Return a value of a state, converting all plain forms to whole tensors in floating point."""
    if is_stored(value):
        return _values(value, None)
    if isinstance(value, Mapping):
        return {key: as_values(one) for key, one in cast("Mapping[Any, Any]", value).items()}
    return value


@torch.no_grad()
def values_of_shard(tensor: Any, dtype: torch.dtype) -> Tensor:
    """Return a sharded state with its local shard in floating point, dequantised if made of several tensors."""
    shard = local(tensor)
    value = shard.dequantize() if has_parts(shard) else shard
    return _shard_like(value.to(dtype), tensor)


def _shard_like(value: Tensor, like: Any) -> Tensor:
    """Return a local shard as a tensor that is sharded like another, on its device."""
    value = value.to(local(like).device)
    if not is_dtensor(like):
        return value
    return sharded_like(value, like).to(like.device)  # offloaded: it is on the device of the mesh now


@torch.no_grad()
def _values(stored: Mapping[str, Any], like: Tensor | None) -> Tensor:
    """Return the values of a stored tensor in floating point: all values, or those for the shard `like`."""
    shape = torch.Size(stored["shape"]) if like is None else local(like).shape
    span = (0, prod(stored["shape"])) if like is None else _span(like)
    block_size = stored["block_size"]
    if block_size and span is not None:
        if span[0] == span[1]:
            return torch.zeros(shape)
        first, last = span[0] // block_size, -(-span[1] // block_size)
        covering = (first * block_size, last * block_size)
        blocks = _dequantize(_rebuilt(stored, torch.Size((covering[1] - covering[0],)), covering))
        return blocks.reshape(-1)[span[0] - covering[0] : span[1] - covering[0]].reshape(shape)
    whole = torch.Size(stored["shape"])
    values = _dequantize(_rebuilt(stored, whole, (0, whole.numel())))
    return values if not is_dtensor(like) else values[box_of_dtensor(like).slices()].contiguous()


def _dequantize(tensor: Any) -> Tensor:
    if not hasattr(tensor, "dequantize"):
        raise ValueError(
            f"the checkpoint's optimizer state is of {type(tensor).__name__}, which does not dequantize(): load it "
            "with as many ranks and the kind of optimizer that saved it"
        )
    return tensor.dequantize()


def _rebuilt(stored: Mapping[str, Any], shape: torch.Size, span: tuple[int, int]) -> Tensor:
    """Return a range of whole blocks as a tensor of the stored class, of the given shape."""
    parts: dict[str, Tensor] = dict(stored["shared"])
    size = prod(stored["shape"])
    for name, leaf in stored["parts"].items():
        start, stop = (end * prod(leaf.shape) // size for end in span)
        flat = _elements(leaf, start, stop)
        parts[name] = flat.view(shape) if name in stored["shaped"] else flat
    context = [shape if one == _SHAPE else one for one in stored["context"]]
    kind = _class_named(stored[_CLASS])
    stride = torch.empty(shape, device="meta").stride()
    return kind.__tensor_unflatten__(parts, context, shape, stride)


def _elements(leaf: Any, start: int, stop: int) -> Tensor:
    """Return a copy of a range of a part's elements. Elements of cut blocks that were not read are zeros."""
    if not hasattr(leaf, "flat_range"):
        return leaf[start:stop].clone()
    first, held = leaf.flat_range()
    found = torch.zeros(stop - start, dtype=held.dtype, device=held.device)
    low, high = max(start, first), min(stop, first + held.numel())
    if low < high:
        found[low - start : high - start] = held[low - first : high - first]
    return found


def _class_named(name: str) -> Any:
    """Return a tensor class from an already imported module: a checkpoint must not cause imports."""
    module, _, path = name.partition(":")
    kind: Any = sys.modules.get(module)
    for each in path.split("."):
        kind = getattr(kind, each, None)
    if not (isinstance(kind, type) and issubclass(kind, Tensor) and hasattr(kind, "__tensor_unflatten__")):
        raise ValueError(
            f"the checkpoint holds optimizer states of {name}, which is not imported here: build the optimizer that "
            f"was saved, or import {module} before load_state()"
        )
    return kind
