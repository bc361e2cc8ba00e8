"""What a user's sampler is made of: the objects that it holds at any depth, and a copy of them to go back to."""

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
# Longer containers hold indices, not samplers.
_LOOKED_THROUGH = 1000


def parts_of(sampler: object) -> Iterator[Any]:
    """A sampler and all that it is made of, each once, in an order that is the same on every rank.

    Datasets, models and values are not looked into.
    """
    return reachable(sampler, lambda part: _held_by(part) if part is sampler or not _is_apart(part) else [])


def reachable(first: object, held_by: Callable[[Any], Sequence[Any]]) -> Iterator[Any]:
    """An object and what it holds, what that holds, and so on, each once.

    Args:
        first: The object.
        held_by: What an object holds, as far as it is to be looked at.
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
    """The length of a sampler or a dataset, if it has one: a batch sampler has only if the sampler inside it does."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


class SamplerCopy:
    """The attributes of a sampler as they stand. Generators, datasets, models and functions are not copied.

    Nor are long containers of anything but numbers and strings: those hold data.

    Attributes:
        content: Two copies of a sampler that did not change have the same.
    """

    def __init__(self, sampler: object) -> None:
        self._sampler = sampler
        self._kept: list[Any] = []
        buffer = io.BytesIO()
        _Pickler(buffer, self._keep).dump(vars(sampler))
        self.content = buffer.getvalue()

    def restore(self) -> None:
        """Give the sampler its attributes back."""
        attributes = _Unpickler(io.BytesIO(self.content), self._kept).load()
        vars(self._sampler).clear()
        vars(self._sampler).update(attributes)

    def _keep(self, part: Any) -> int | bytes | None:
        """A part's number if it is not copied, its copy if that is quicker made at once, else None."""
        if isinstance(part, _CONTAINERS) and len(part) > _LOOKED_THROUGH:  # pyright: ignore[reportUnknownArgumentType]
            if isinstance(next(iter(part)), (int, float, str, bytes)):  # pyright: ignore[reportUnknownArgumentType]
                return pickle.dumps(part, protocol=pickle.HIGHEST_PROTOCOL)
        elif part is not self._sampler and not _is_apart(part):
            return None
        self._kept.append(part)
        return len(self._kept) - 1


def copy_of(sampler: object) -> SamplerCopy | None:
    """A copy of a sampler's attributes; None if it has none, or holds what cannot be copied."""
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
        """What stands for a part; None for the part itself."""
        return self._keep(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, kept: list[Any]) -> None:
        super().__init__(buffer)
        self._kept = kept

    def persistent_load(self, pid: Any) -> Any:
        """The part that this stands for."""
        return pickle.loads(pid) if isinstance(pid, bytes) else self._kept[pid]


def _is_apart(part: Any) -> bool:
    """Whether a part is no piece of the sampler's own: a generator, or data and code that it refers to."""
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
