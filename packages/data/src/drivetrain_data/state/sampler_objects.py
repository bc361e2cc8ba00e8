"""Walk the objects that a user's sampler holds at any depth, and copy them so that they can be restored."""

import io
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

_CONTAINERS = (list, tuple, set, frozenset, deque)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_FOREIGN = (Dataset, DataLoader, torch.nn.Module, type, FunctionType, BuiltinFunctionType, ModuleType)
_VALUES = (str, bytes, int, float, complex, type(None), torch.Tensor, np.ndarray, np.generic)
# Containers longer than this are taken to hold indices, not samplers.
_LOOKED_THROUGH = 1000


def parts_of(sampler: object) -> Iterator[Any]:
    """Yield a sampler and every object that it holds at any depth, once each, in the same order on every rank.

    Datasets, models and values are yielded, but their contents are not.
    """
    return reachable(sampler, lambda part: _held_by(part) if part is sampler or not _is_apart(part) else [])


def reachable(first: object, held_by: Callable[[Any], Sequence[Any]]) -> Iterator[Any]:
    """Yield an object and every object that can be reached from it, once each.

    Args:
        first: The object to start from.
        held_by: A function that returns the objects that an object holds and that should be visited.
    """
    seen: set[int] = set()
    waiting = [first]
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        waiting += reversed(held_by(part))


def length_of(sized: Any) -> int | None:
    """Return the length of a sampler or dataset, or None; a batch sampler has one only if its inner sampler has."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


class SamplerCopy:
    """A copy of a sampler's current attributes, without generators, datasets, models and functions.

    Long containers are copied only if they hold numbers or strings; others are taken to hold data.

    Attributes:
        content: The serialized attributes, equal for two copies of a sampler that did not change in between.
    """

    def __init__(self, sampler: object) -> None:
        self._sampler = sampler
        self._kept: list[Any] = []
        buffer = io.BytesIO()
        _Pickler(buffer, self._keep).dump(vars(sampler))
        self.content = buffer.getvalue()

    def restore(self) -> None:
        """Restore the attributes of the sampler."""
        attributes = _Unpickler(io.BytesIO(self.content), self._kept).load()
        vars(self._sampler).clear()
        vars(self._sampler).update(attributes)

    def _keep(self, part: Any) -> int | bytes | None:
        """Return the number of a part that is not copied, the pickled bytes of a long container, or else None."""
        if isinstance(part, _CONTAINERS) and len(part) > _LOOKED_THROUGH:  # pyright: ignore[reportUnknownArgumentType]
            if isinstance(next(iter(part)), (int, float, str, bytes)):  # pyright: ignore[reportUnknownArgumentType]
                return pickle.dumps(part, protocol=pickle.HIGHEST_PROTOCOL)
        elif part is not self._sampler and not _is_apart(part):
            return None
        self._kept.append(part)
        return len(self._kept) - 1


def copy_of(sampler: object) -> SamplerCopy | None:
    """Return a copy of a sampler's attributes; None if it has none, or they cannot be copied."""
    if not hasattr(sampler, "__dict__"):
        return None
    try:
        return SamplerCopy(sampler)
    except (pickle.PicklingError, TypeError, AttributeError):
        return None


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, keep: Callable[[Any], int | bytes | None]) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self._keep = keep

    def persistent_id(self, obj: Any) -> int | bytes | None:
        """Return the persistent ID of a part, or None to pickle the part itself."""
        return self._keep(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, kept: list[Any]) -> None:
        super().__init__(buffer)
        self._kept = kept

    def persistent_load(self, pid: Any) -> Any:
        """Return the part that a persistent ID stands for."""
        return pickle.loads(pid) if isinstance(pid, bytes) else self._kept[pid]


def _is_apart(part: Any) -> bool:
    """Return whether a part is not the sampler's own: a generator, or data or code that the sampler refers to."""
    if isinstance(part, (*_VALUES, *_CONTAINERS, dict)):
        return False
    if isinstance(part, (*_GENERATORS, *_FOREIGN)):
        return True
    return hasattr(type(part), "__getitem__") and hasattr(type(part), "__len__")


def _held_by(part: Any) -> list[Any]:
    if isinstance(part, _VALUES):
        return []
    if isinstance(part, (*_CONTAINERS, dict)):
        inside: Any = part.values() if isinstance(part, dict) else part  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        return list(inside) if len(inside) <= _LOOKED_THROUGH else []
    slots = [name for kind in type(part).__mro__ for name in _slots_of(kind) if hasattr(part, name)]
    return [*getattr(part, "__dict__", {}).values(), *(getattr(part, name) for name in slots)]


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if not name.startswith("__"))
