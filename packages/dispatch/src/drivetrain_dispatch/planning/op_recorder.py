"""Record each operation of a forward on the meta device: its FLOPs, memory traffic and allocations."""

import weakref
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from math import prod
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakIdKeyDictionary

from drivetrain_dispatch.compat import GROUPED_PRODUCT, Args, Kwargs, TorchDispatchMode, Types
from drivetrain_dispatch.model.nested_values import map_tensors, tensors_in

# Operations that touch only the selected rows, not the whole table.
_PICKING = frozenset({"embedding", "gather", "index", "index_select"})
_PUTTING = frozenset({"index_copy_", "index_put_", "scatter_", "slice_scatter_"})
_NO_MEMORY = -1


class MeasuredOperation(NamedTuple):
    """An operation of a forward."""

    block: int
    flops: int
    size_bytes: int


class MemoryChange(NamedTuple):
    """An allocation or release of memory, or, with a size of 0, the start of a block."""

    block: int
    # The number of the storage, from 0 in the order in which storages are first seen; -1 for none.
    memory: int
    size_bytes: int  # the bytes of the storage; negative for a release


class OpRecorder(TorchDispatchMode):
    """A mode that records operations and the memory that they allocate, by block."""

    def __init__(self, weights: Iterable[tuple[Tensor, int]]) -> None:
        super().__init__()
        self.operations: list[MeasuredOperation] = []
        self.changes: list[MemoryChange] = []
        self._flops = FlopCounterMode(display=False)
        self._owners = WeakIdKeyDictionary()  # the storage of a weight -> its block
        for tensor, block in weights:
            self._owners.setdefault(tensor.untyped_storage(), block)
        self._memories = WeakIdKeyDictionary()  # any other storage -> its number
        self._num_memories = 0
        self._running: list[int] = []
        self._last = -1

    def __enter__(self) -> "OpRecorder":
        """Start to record. Torch's FLOP counter is entered first, so that this mode sees each operation first."""
        self._flops.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._flops.__exit__(*raised)

    def begin(self, block: int, *_: object) -> None:
        """Record that a block's forward begins; used as a forward pre-hook."""
        self._running.append(block)
        self._last = block
        self.changes.append(MemoryChange(block, _NO_MEMORY, 0))

    def end(self, *_: object) -> None:
        """Record that the innermost running forward ends; used as a forward hook."""
        self._running.pop()
        if self._running:
            self._last = self._running[-1]

    def memories_of(self, tensors: Iterable[Tensor]) -> set[int]:
        """Return the numbers of the tensors' storages; storages that no operation used are left out."""
        found = (self._memories.get(tensor.untyped_storage()) for tensor in tensors)
        return {number for number in found if number is not None}

    def note(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, flops: int, size_bytes: int
    ) -> None:
        """Record an operation that has run."""
        if not self._running:
            # Between two blocks: the one whose weights the operation uses, else the earlier.
            owners = (self._owners.get(tensor.untyped_storage()) for tensor in inputs)
            self._last = next((owner for owner in owners if owner is not None), self._last)
        for tensor in chain(inputs, outputs):
            storage = tensor.untyped_storage()
            if not tensor.is_meta or storage in self._owners or storage in self._memories:
                continue
            number, new_bytes = self._num_memories, storage.nbytes()
            self._memories[storage] = number
            self._num_memories += 1
            self.changes.append(MemoryChange(self._last, number, new_bytes))
            weakref.finalize(storage, self._forget, number, new_bytes).atexit = False
        if flops or size_bytes:
            self.operations.append(MeasuredOperation(self._last, flops, size_bytes))

    def _forget(self, number: int, size_bytes: int) -> None:
        self.changes.append(MemoryChange(self._last, number, -size_bytes))

    def __torch_dispatch__(self, func: Any, types: Types, args: Args = (), kwargs: Kwargs = None) -> Any:
        given = args
        if any(tensor.is_meta for tensor in tensors_in(args)):  # a small table may hold data, for example
            given = map_tensors(args, lambda tensor: tensor.to("meta") if tensor.dim() else tensor)
        before = self._flops.get_total_flops()
        result = func(*given, **(kwargs or {}))
        inputs, outputs = list(tensors_in((given, kwargs or {}))), list(tensors_in(result))
        if any(tensor.is_meta for tensor in outputs):
            name = func.__name__.partition(".")[0]
            flops = self._flops.get_total_flops() - before
            if name == GROUPED_PRODUCT and not flops:  # torch 2.15 does not count them
                flops = 2 * inputs[0].shape[0] * prod(inputs[1].shape[-2:])
            self.note(inputs, outputs, flops=flops, size_bytes=_count_touched(name, inputs, outputs))
        return result


class FusedAttention(TorchFunctionMode):
    """A mode that records attention as a fused kernel without scores; the meta device alone would not fuse."""

    def __init__(self, recorder: OpRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Types, args: Args = (), kwargs: Kwargs = None) -> Any:
        """Run a function; for attention, only record it and create its output."""
        said = dict(kwargs or {})
        if func is not F.scaled_dot_product_attention:
            return func(*args, **said)
        given = dict(zip(("query", "key", "value"), args, strict=False)) | said
        query, key, value = given["query"], given["key"], given["value"]
        result = query.new_empty((*query.shape[:-1], value.shape[-1]))
        self._recorder.note(
            [query, key, value],
            [result],
            flops=2 * prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1]),
            size_bytes=sum(map(_size_bytes, (query, key, value, result))),
        )
        return result


def kept_memories(changes: Iterable[MemoryChange], results: Collection[int]) -> set[int]:
    """Return the numbers of the storages that are still allocated at the end, except storages of results."""
    left: set[int] = set()
    for change in changes:
        if change.size_bytes < 0:
            left.discard(change.memory)
        elif change.memory != _NO_MEMORY:
            left.add(change.memory)
    return left.difference(results)


def peaks(changes: Iterable[MemoryChange], kept: Collection[int]) -> dict[int, int]:
    """Return the most bytes that are allocated at once while each block runs, without kept storages."""
    live = 0
    most: dict[int, int] = {}
    for change in changes:
        if change.memory not in kept:
            live += change.size_bytes
        most[change.block] = max(most.get(change.block, 0), live)
    return most


def _count_touched(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """Return the bytes that an operation reads and writes."""
    if name in _PICKING:
        return 2 * sum(map(_size_bytes, outputs)) + sum(map(_size_bytes, inputs[1:]))
    if name in _PUTTING:
        return 2 * sum(map(_size_bytes, inputs[1:]))
    sizes = [_size_bytes(tensor) for tensor in inputs]
    if name == GROUPED_PRODUCT:  # reads only the matrices of experts that have rows
        sizes[1] = int(sizes[1] * min(1, inputs[0].shape[0] / inputs[1].shape[0]))
    there = {id(tensor.untyped_storage()) for tensor in inputs}
    is_view = not name.endswith("_") and all(id(tensor.untyped_storage()) in there for tensor in outputs)
    return 0 if is_view or "empty" in name else sum(sizes) + sum(map(_size_bytes, outputs))


def _size_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor; for an expanded tensor, at most the bytes of its storage."""
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())
