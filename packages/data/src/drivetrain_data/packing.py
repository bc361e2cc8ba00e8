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
    """What is the same from step to step as long as shapes and structure are.

    Attributes:
        note: What the sender tells along with each step.
        batches: The step's batches, with a place for each tensor and object.
    """

    note: Any
    batches: tuple[Nested, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A step's batches taken apart.

    Attributes:
        layout: Their structure.
        tensors: Their tensors, in walking order.
        objects: Their other leaves, in walking order, batch by batch.
        num_bytes: The bytes that the tensors take in a message.
        tag: A number that goes with it.
    """

    layout: Layout
    tensors: list[torch.Tensor]
    objects: list[list[Any]]
    num_bytes: int
    tag: int


def take_apart(note: Any, batches: Sequence[Nested], *, tag: int = 0) -> Step:
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
    num_bytes = sum(_aligned(tensor.nbytes) for tensor in tensors)
    return Step(Layout(note, tuple(places)), tensors, objects, num_bytes, tag)


def pack(steps: Sequence[Step], *, with_layout: bool, capacity: int) -> tuple[Bytes, int]:
    """Lay steps of one layout out in at least `capacity` bytes.

    Returns:
        The bytes, and how many of them are used.
    """
    layout = pickle.dumps(steps[0].layout) if with_layout else b""
    has_objects = any(steps[0].objects)
    objects = pickle.dumps([step.objects for step in steps]) if has_objects else b""
    step_bytes = steps[0].num_bytes
    tag_bytes = _aligned(8 * len(steps))
    used = HEADER_BYTES + tag_bytes + len(steps) * step_bytes + len(objects) + len(layout)
    packed = np.empty(max(used, capacity), dtype=np.uint8)
    packed[:HEADER_BYTES].view(np.int64)[:4] = (len(steps), step_bytes, len(objects), len(layout))
    packed[HEADER_BYTES : HEADER_BYTES + 8 * len(steps)].view(np.int64)[:] = [step.tag for step in steps]
    offset = HEADER_BYTES + tag_bytes
    for step in steps:
        for tensor in step.tensors:
            size = tensor.nbytes
            if size:
                flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                packed[offset : offset + size] = flat.numpy()
            offset += _aligned(size)
    for text in (objects, layout):
        packed[offset : offset + len(text)] = np.frombuffer(text, dtype=np.uint8)
        offset += len(text)
    return packed, used


def used_bytes(header: Bytes) -> int:
    """The length of a message, read from its first bytes."""
    num_steps, step_bytes, num_objects, num_layout = _header(header)
    return HEADER_BYTES + _aligned(8 * num_steps) + num_steps * step_bytes + num_objects + num_layout


class Unpacked:
    """A message as it arrived; tensors taken from it share its memory.

    Args:
        packed: The bytes.

    Attributes:
        num_steps: The steps in it.
        tags: Their tags.
        layout: The layout that it brings; None if it is that of the message before.
    """

    def __init__(self, packed: Bytes) -> None:
        self._packed = packed
        self.num_steps, self._step_bytes, num_objects, num_layout = _header(packed)
        self.tags: list[int] = (
            packed[HEADER_BYTES : HEADER_BYTES + 8 * self.num_steps].view(np.int64).tolist()
        )
        self._begin = HEADER_BYTES + _aligned(8 * self.num_steps)
        start = self._begin + self.num_steps * self._step_bytes
        objects = packed[start : start + num_objects].data
        layout = packed[start + num_objects : start + num_objects + num_layout].data
        self._objects: list[list[list[Any]]] | None = pickle.loads(objects) if num_objects else None
        self.layout: Layout | None = pickle.loads(layout) if num_layout else None

    def batch(self, layout: Layout, step: int, index: int) -> Nested:
        """One batch of one step."""
        packed = self._packed
        objects: Iterator[Any] = iter(self._objects[step][index] if self._objects else ())
        offset = self._begin + step * self._step_bytes + sum(map(_tensor_bytes, layout.batches[:index]))

        def fill(leaf: TensorPlace | ObjectPlace) -> Any:
            nonlocal offset
            if not isinstance(leaf, TensorPlace):
                return next(objects)
            count = prod(leaf.shape)
            if not count:
                return torch.empty(leaf.shape, dtype=leaf.dtype)
            flat = torch.frombuffer(packed, dtype=leaf.dtype, count=count, offset=offset)
            offset += _aligned(flat.nbytes)
            return flat.view(leaf.shape)

        return map_leaves(layout.batches[index], fill)


_OBJECT = ObjectPlace()


def _header(packed: Bytes) -> list[int]:
    return packed[:HEADER_BYTES].view(np.int64)[:4].tolist()


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
