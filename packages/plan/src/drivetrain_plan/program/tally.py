"""Counts what a training step allocates, computes and sends, operation by operation, on tensors without data."""

import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from drivetrain_dispatch.compat import GROUPED_PRODUCT, Args, Kwargs, TorchDispatchMode, Types, tree_leaves
from drivetrain_plan.compat import FakeTensor, tree_map, unset_fake_temporarily
from drivetrain_plan.hardware import Collective
from drivetrain_state.mesh import View

# What c10d's operations are, by their names; the payload is the largest of their tensors, the whole that is meant.
_COLLECTIVES: Mapping[str, Collective] = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
}
_NAMESPACES = ("c10d", "_c10d_functional")
_INDICES = frozenset({"arange", "ones", "zeros", "full", "scalar_tensor", "empty"})  # what creates them
_MOST_INDICES = 2**24  # elements of what is computed for real


class StepTally(TorchDispatchMode):
    """A mode that counts the bytes of storages while they exist, operations and their bytes, and collectives.

    It computes indices for real, such as positions and masks, in which a model's forward may look for values; all
    else has no data.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.gradient_bytes = 0
        # The most bytes that were allocated at once since `restart`, without gradients.
        self.computing_bytes = 0
        self._seen = WeakIdKeyDictionary()
        self._resized: list[tuple[torch.UntypedStorage, list[int]]] = []  # each with its bytes in `_seen`
        self.flops = self.moved_bytes = self.num_operations = 0
        self.payloads: defaultdict[tuple[View, Collective], float] = defaultdict(float)
        self.calls: defaultdict[tuple[View, Collective], float] = defaultdict(float)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of tensors, each once."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage in self._seen:
                continue
            size_bytes = storage.nbytes()
            self._seen[storage] = held = [size_bytes]
            self.live_bytes += size_bytes
            weakref.finalize(storage, self._forget, held).atexit = False
        for storage, held in self._resized:
            if (size_bytes := storage.nbytes()) != held[0]:
                self.live_bytes += size_bytes - held[0]
                held[0] = size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.computing_bytes = max(self.computing_bytes, self.live_bytes - self.gradient_bytes)

    def note_gradient(self, parameter: Tensor) -> None:
        """Count a parameter's gradient, just completed by autograd, as a gradient."""
        if parameter.grad is not None:
            self.gradient_bytes += parameter.grad.untyped_storage().nbytes()

    def restart(self, *, keeps_computing: bool = False) -> None:
        """Begin new peaks at the memory that is allocated now; `keeps_computing` leaves that without gradients."""
        self.peak_bytes = self.live_bytes
        if not keeps_computing:
            self.computing_bytes = self.live_bytes - self.gradient_bytes

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of tensors at their present sizes, which other code changes, as FSDP does."""
        given = list(tensors)
        self.add(given)
        self._resized += [(one, self._seen[one]) for one in {tensor.untyped_storage() for tensor in given}]
        self.add(())

    def _forget(self, held: list[int]) -> None:
        self.live_bytes -= held[0]

    def clear_counts(self) -> None:
        """Begin to count operations and collectives anew."""
        self.flops = self.moved_bytes = self.num_operations = 0
        self.payloads.clear()
        self.calls.clear()

    def send(self, view: View, kind: Collective, size_bytes: float) -> None:
        """Count a collective."""
        self.payloads[view, kind] += size_bytes
        self.calls[view, kind] += 1

    def __torch_dispatch__(self, func: Any, types: Types, args: Args = (), kwargs: Kwargs = None) -> Any:
        if any(map(_computes_itself, types)):
            return NotImplemented  # what it does to its local tensors comes here next
        said = kwargs or {}
        if func.namespace == "prim":  # a tensor's device, asked for more often than all else
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args, **said)
        given = [leaf for leaf in tree_leaves((args, said)) if isinstance(leaf, Tensor)]
        name = func.__name__.partition(".")[0]
        if func.namespace == "c10d" and any(isinstance(one, FakeTensor) for one in given):
            result = _exchanged(func, args, said)
        else:
            with unset_fake_temporarily() if _is_of_indices(name, given, args, said) else nullcontext():
                result = func(*args, **said)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.add(made)
        if func.namespace in _NAMESPACES:
            if (kind := _COLLECTIVES.get(name)) is not None:
                # FSDP gathers and scatters among the ranks that shard, and averages among replicas.
                self.send(
                    "data" if kind == "all_reduce" else "fsdp", kind, max(map(_size_bytes, given + made))
                )
            return result
        self.num_operations += 1
        if (count := flop_registry.get(func.overloadpacket)) is not None:
            self.flops += count(*args, **said, out_val=result)
        elif name == GROUPED_PRODUCT:  # which torch 2.15 does not count
            self.flops += _grouped_flops(*args[:2])
        elif not _is_view(given, made) and "empty" not in name:
            self.moved_bytes += sum(map(_size_bytes, given)) + sum(map(_size_bytes, made))
        return result


def _grouped_flops(first: Tensor, other: Tensor) -> int:
    """Return the operations of a grouped product, whose groups are together the rows or the columns.

    Example:
        >>> _grouped_flops(torch.empty(10, 4), torch.empty(3, 4, 5))  # ten rows, each by one of three matrices
        400
    """
    num_alike = len(first) if first.dim() == 3 > other.dim() else 1
    return 2 * first.numel() // num_alike * other.shape[-1]


def _exchanged(func: Any, args: Args, kwargs: Mapping[str, Any]) -> Any:
    """Return the result of a collective in place, which is called with no bytes: torch 2.9 refuses fake tensors."""

    def emptied(value: Any) -> Any:
        return torch.empty(0) if isinstance(value, Tensor) else value

    with unset_fake_temporarily():
        result = func(*tree_map(emptied, args), **tree_map(emptied, dict(kwargs)))
    outputs = (leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor))

    def given(value: Any) -> Any:
        return next(outputs) if isinstance(value, Tensor) else value

    return tree_map(given, result)


def _computes_itself(kind: type) -> bool:
    """Return whether a kind of tensors computes on tensors that it holds, as a DTensor and a divided output do."""
    own, plain = (getattr(one, "__torch_dispatch__", None) for one in (kind, Tensor))
    return not issubclass(kind, FakeTensor) and own != plain


def _is_of_indices(name: str, given: list[Tensor], args: Args, kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation is one on small integers or booleans that have values, or creates such."""
    if not given:
        said = kwargs.get("dtype")
        if name not in _INDICES:
            return False
        if said is None:
            numbers = [one for one in tree_leaves(args) if isinstance(one, int | float)]
            return name == "arange" and all(isinstance(one, int) for one in numbers)
        if said.is_floating_point or said.is_complex:
            return False
        return name == "arange" or prod(args[0] if args and isinstance(args[0], list) else ()) < _MOST_INDICES
    if any(isinstance(one, FakeTensor) or one.is_meta for one in given):
        return False
    if any(one.is_floating_point() or isinstance(one, nn.Parameter) for one in given):
        return False
    try:
        shape = torch.broadcast_shapes(*(one.shape for one in given))
    except RuntimeError:
        shape = max((one.shape for one in given), key=prod)
    return prod(shape) < _MOST_INDICES


def _is_view(given: list[Tensor], made: list[Tensor]) -> bool:
    there = {id(one.untyped_storage()) for one in given}
    return bool(made) and all(id(one.untyped_storage()) in there for one in made)


def _size_bytes(tensor: Tensor) -> int:
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())
