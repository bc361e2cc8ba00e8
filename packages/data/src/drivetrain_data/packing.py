"""A message of nested batches as one run of bytes: header, tensors, other objects, and the layout if it is new."""

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
_ALIGNMENT = 16

Bytes = npt.NDArray[np.uint8]


class TensorPlace:
    """Where a tensor stood in a batch; no dataclass, for the walk over a batch would enter it."""

    __slots__ = ("dtype", "shape")

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.dtype = dtype
        self.shape = shape

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorPlace):
            return NotImplemented
        return self.shape == other.shape and self.dtype == other.dtype

    def __hash__(self) -> int:
        return hash((self.dtype, self.shape))


class ObjectPlace:
    """Where any other object stood in a batch."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectPlace)

    def __hash__(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Layout:
    """What is the same from message to message as long as shapes and structure are.

    Attributes:
        note: What the sender tells along with it.
        batches: The batches, with a place for each tensor and object.
    """

    note: Any
    batches: tuple[Nested, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """Batches taken apart.

    Attributes:
        layout: Their structure.
        tensors: Their tensors, in walking order.
        objects: Their other leaves, in walking order, batch by batch.
    """

    layout: Layout
    tensors: list[torch.Tensor]
    objects: list[list[Any]]


def take_apart(note: Any, batches: Sequence[Nested]) -> Message:
    """Separate tensors and objects from structure."""
    tensors: list[torch.Tensor] = []
    objects: list[list[Any]] = []
    places: list[Nested] = []
    for batch in batches:
        others: list[Any] = []

        def place(leaf: Any, others: list[Any] = others) -> TensorPlace | ObjectPlace:
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_quantized:
                tensors.append(leaf)
                return TensorPlace(leaf.dtype, tuple(leaf.shape))
            others.append(leaf)
            return _OBJECT

        places.append(map_leaves(batch, place))
        objects.append(others)
    return Message(Layout(note, tuple(places)), tensors, objects)


def pack(message: Message, *, with_layout: bool, capacity: int) -> tuple[Bytes, int]:
    """Lay a message out in at least `capacity` bytes.

    Returns:
        The bytes, and how many of them are used.
    """
    layout = pickle.dumps(message.layout) if with_layout else b""
    objects = pickle.dumps(message.objects) if any(message.objects) else b""
    sizes = [tensor.nbytes for tensor in message.tensors]
    num_tensor_bytes = sum(map(_aligned, sizes))
    used = HEADER_BYTES + num_tensor_bytes + len(objects) + len(layout)
    packed = np.empty(max(used, capacity), dtype=np.uint8)
    packed[:HEADER_BYTES].view(np.int64)[:3] = (num_tensor_bytes, len(objects), len(layout))
    offset = HEADER_BYTES
    for tensor, size in zip(message.tensors, sizes, strict=True):
        if size:
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            packed[offset : offset + size] = flat.numpy()
        offset += _aligned(size)
    for text in (objects, layout):
        packed[offset : offset + len(text)] = np.frombuffer(text, dtype=np.uint8)
        offset += len(text)
    return packed, used


def used_bytes(packed: Bytes) -> int:
    """The length of a message, read from its first bytes."""
    return HEADER_BYTES + sum(packed[:HEADER_BYTES].view(np.int64)[:3].tolist())


def unpack_layout(packed: Bytes) -> Layout | None:
    """The layout that a message brings; None if it is that of the message before."""
    num_tensor_bytes, num_objects, num_layout = packed[:HEADER_BYTES].view(np.int64)[:3].tolist()
    if not num_layout:
        return None
    start = HEADER_BYTES + num_tensor_bytes + num_objects
    return pickle.loads(packed[start : start + num_layout].data)


def unpack_batch(packed: Bytes, layout: Layout, index: int) -> Nested:
    """One batch of a message; its tensors share the message's memory."""
    num_tensor_bytes, num_objects, _ = packed[:HEADER_BYTES].view(np.int64)[:3].tolist()
    start = HEADER_BYTES + num_tensor_bytes
    objects: Iterator[Any] = iter(())
    if num_objects:
        objects = iter(pickle.loads(packed[start : start + num_objects].data)[index])
    offset = HEADER_BYTES + sum(map(_tensor_bytes, layout.batches[:index]))

    def fill(leaf: TensorPlace | ObjectPlace) -> Any:
        nonlocal offset
        if not isinstance(leaf, TensorPlace):
            return next(objects)
        count = prod(leaf.shape)
        if not count:
            return torch.empty(leaf.shape, dtype=leaf.dtype)
        flat = torch.frombuffer(packed.data, dtype=leaf.dtype, count=count, offset=offset)
        offset += _aligned(flat.nbytes)
        return flat.view(leaf.shape)

    return map_leaves(layout.batches[index], fill)


_OBJECT = ObjectPlace()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _tensor_bytes(places: Nested) -> int:
    """The bytes that the tensors of a batch take in a message."""
    total = 0

    def add(leaf: TensorPlace | ObjectPlace) -> None:
        nonlocal total
        if isinstance(leaf, TensorPlace):
            total += _aligned(prod(leaf.shape) * leaf.dtype.itemsize)

    map_leaves(places, add)
    return total
