"""A message for one rank as contiguous bytes: header, tensors, other objects and, if it has changed, the layout."""

import ctypes
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from drivetrain_data._nested import Nested, map_leaves

HEADER_BYTES = 64
# Fields of 8 bytes: the number of steps, the bytes of a step's tensors, of the objects, of the layout and of the
# longest message, and the number of the loop.
_NUM_FIELDS = 6
_ALIGNMENT = 16

Bytes = npt.NDArray[np.uint8]


class TensorPlace:
    """A placeholder for a tensor in a batch; not a dataclass, because `map_leaves` would descend into it."""

    __slots__ = ("dtype", "requires_grad", "shape")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self.shape = tuple(tensor.shape)
        self.requires_grad = tensor.requires_grad


class ObjectPlace:
    """A placeholder for any other object in a batch."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The part of a step that depends only on its structure and shapes, with a note such as its plan."""

    note: Any
    places: Nested

    def same(self, other: "Layout") -> bool:
        """Return whether either layout decodes the other's messages; even types and the order of keys must match."""
        return self.note == other.note and _same_places(self.places, other.places)


@dataclass(frozen=True, slots=True)
class SeparatedBatch:
    """A batch separated into layout, tensors and objects, in traversal order."""

    layout: Layout
    tensors: list[torch.Tensor]
    objects: list[Any]
    num_bytes: int


def take_apart(note: Any, batch: Nested) -> SeparatedBatch:
    """Separate a batch into its layout, tensors and other objects."""
    tensors: list[torch.Tensor] = []
    objects: list[Any] = []

    def place(leaf: Any) -> TensorPlace | ObjectPlace:
        if (
            type(leaf) is torch.Tensor
            and leaf.layout is torch.strided
            and not (leaf.is_quantized or leaf.is_nested)
        ):
            tensors.append(leaf)
            return TensorPlace(leaf)
        objects.append(leaf)
        return _OBJECT

    places = map_leaves(batch, place)
    return SeparatedBatch(
        Layout(note, places), tensors, objects, sum(_aligned(tensor.nbytes) for tensor in tensors)
    )


class Outgoing:
    """A message of steps that share a layout, ready to be written; `used` is its size in bytes.

    A message holds a tag for each step, the number of the sender's loop and, if the receiver lacks it, the layout.
    """

    def __init__(
        self, steps: Sequence[SeparatedBatch], tags: Sequence[int], *, loop: int, with_layout: bool
    ) -> None:
        self._steps = steps
        self._tags = tags
        self._loop = loop
        self._layout = pickle.dumps(steps[0].layout) if with_layout else b""
        self._objects = pickle.dumps([step.objects for step in steps]) if steps[0].objects else b""
        self._begin = HEADER_BYTES + _aligned(8 * len(steps))
        self.used = self._begin + len(steps) * steps[0].num_bytes + len(self._objects) + len(self._layout)

    def write(self, into: Bytes, *, longest: int) -> None:
        """Write the message into a buffer; `longest` is the size of the longest message sent at the same time."""
        steps, objects, layout = self._steps, self._objects, self._layout
        header = (len(steps), steps[0].num_bytes, len(objects), len(layout), longest, self._loop)
        into[: 8 * _NUM_FIELDS].view(np.int64)[:] = header
        into[HEADER_BYTES : HEADER_BYTES + 8 * len(steps)].view(np.int64)[:] = self._tags
        address, offset = into.ctypes.data, self._begin
        for step in steps:
            for tensor in step.tensors:
                if not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
                    tensor = tensor.detach().resolve_neg().resolve_conj().contiguous()
                on_cpu = tensor.cpu()
                ctypes.memmove(address + offset, on_cpu.data_ptr(), on_cpu.nbytes)
                offset += _aligned(on_cpu.nbytes)
        for text in (objects, layout):
            into[offset : offset + len(text)] = np.frombuffer(text, dtype=np.uint8)
            offset += len(text)


def longest_bytes(header: Bytes) -> int:
    """Read the size in bytes of the longest message sent to any rank at the same time from a header."""
    return _header(header)[4]


class Incoming:
    """A received message, whose memory its tensors share. The layout is None if the previous layout still applies."""

    def __init__(self, packed: Bytes) -> None:
        num_steps, self._step_bytes, num_objects, num_layout, _, self.loop = _header(packed)
        self._packed = packed
        self._begin = HEADER_BYTES + _aligned(8 * num_steps)
        self.tags: list[int] = packed[HEADER_BYTES : HEADER_BYTES + 8 * num_steps].view(np.int64).tolist()
        start = self._begin + num_steps * self._step_bytes
        objects = packed[start : start + num_objects].data
        layout = packed[start + num_objects : start + num_objects + num_layout].data
        self._objects: list[list[Any]] | None = pickle.loads(objects) if num_objects else None
        self.layout: Layout | None = pickle.loads(layout) if num_layout else None

    def batch(self, layout: Layout, step: int) -> Nested:
        """Return the batch of one step."""
        packed = self._packed
        objects: Iterator[Any] = iter(self._objects[step] if self._objects else ())
        offset = self._begin + step * self._step_bytes

        def fill(leaf: TensorPlace | ObjectPlace) -> Any:
            nonlocal offset
            if not isinstance(leaf, TensorPlace):
                return next(objects)
            count = prod(leaf.shape)
            if not count:
                return torch.empty(leaf.shape, dtype=leaf.dtype, requires_grad=leaf.requires_grad)
            flat = torch.frombuffer(packed, dtype=leaf.dtype, count=count, offset=offset)
            offset += _aligned(flat.nbytes)
            tensor = flat.view(leaf.shape)
            return tensor.requires_grad_() if leaf.requires_grad else tensor

        return map_leaves(layout.places, fill)


_OBJECT = ObjectPlace()


def _same_places(one: Nested, other: Nested) -> bool:
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is TensorPlace:
        return (one.shape, one.dtype, one.requires_grad) == (other.shape, other.dtype, other.requires_grad)
    if kind is ObjectPlace:
        return True
    if kind is dict:
        return list(one) == list(other) and all(map(_same_places, one.values(), other.values()))
    if kind is list or kind is tuple:
        return len(one) == len(other) and all(map(_same_places, one, other))
    return pickle.dumps(one) == pickle.dumps(other)  # other types may hold more than their children


def _header(packed: Bytes) -> list[int]:
    return packed[: 8 * _NUM_FIELDS].view(np.int64).tolist()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
