"""Walk the objects that a user's sampler holds at any depth, to seed, compare and restore them."""

import io
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from drivetrain_data.randomness.generators import KeyedDraws, is_generator, seed_generator
from drivetrain_data.randomness.permutation import hash_key

CONTAINERS = (list, tuple, set, frozenset, deque)
# Containers longer than this are taken to hold indices, not samplers.
LOOKED_THROUGH = 1000

_VALUES = (str, bytes, int, float, complex, type(None), torch.Tensor, np.ndarray, np.generic)
_REFERRED_TO = (Dataset, DataLoader, torch.nn.Module, type, FunctionType, BuiltinFunctionType, ModuleType)


@runtime_checkable
class StatefulReader(Protocol):
    """An iterable with a state dict, such as a sampler, Hugging Face's datasets and torchdata's loaders."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state that the iteration depends on."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state, from which the next iteration continues."""
        ...


def parts_of(sampler: object) -> Iterator[Any]:
    """Yield a sampler and every object that it holds at any depth, once each, in the same order on every rank.

    Datasets, models and values are yielded, but their contents are not.
    """
    return reachable(sampler, lambda part: held_by(part) if part is sampler or not is_apart(part) else [])


def reachable(first: object, held_by: Callable[[Any], Sequence[Any]]) -> Iterator[Any]:
    """Yield an object and every object that can be reached from it by `held_by`, once each."""
    seen: set[int] = set()
    waiting = [first]
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        waiting += reversed(held_by(part))


def held_by(part: Any) -> list[Any]:
    """Return what an object holds: the items of a container that is not too long, or its attributes and slots."""
    if isinstance(part, _VALUES):
        return []
    if isinstance(part, (*CONTAINERS, dict)):
        inside: Any = part.values() if isinstance(part, dict) else part  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        return list(inside) if len(inside) <= LOOKED_THROUGH else []
    slots = [name for kind in type(part).__mro__ for name in _slots_of(kind) if hasattr(part, name)]
    return [*getattr(part, "__dict__", {}).values(), *(getattr(part, name) for name in slots)]


def is_apart(part: Any) -> bool:
    """Return whether a part does not belong to the sampler's state: a generator, or data or code that it uses."""
    if isinstance(part, (*_VALUES, *CONTAINERS, dict)):
        return False
    if is_generator(part) or isinstance(part, _REFERRED_TO):
        return True
    return hasattr(type(part), "__getitem__") and hasattr(type(part), "__len__")


def own_generators(sampler: object) -> Iterator[Any]:
    """Yield every generator that a sampler holds at any depth, except the global ones."""
    numpy_random: Any = np.random  # its global generator has no public name
    shared = (torch.default_generator, numpy_random.mtrand._rand)
    for part in parts_of(sampler):
        if is_generator(part) and not any(part is one for one in shared):
            yield part


def seed_own_generators(sampler: object, *key: int) -> None:
    """Seed every generator that a sampler holds, except the global ones, from the key and the generator's number."""
    for number, generator in enumerate(own_generators(sampler)):
        seed_generator(generator, hash_key(*key, number) if number else hash_key(*key))


def prepare_sampler(sampler: object, seed: int, epoch: int) -> None:
    """Call a sampler's `set_epoch`, if it has one, and seed the generators that it holds."""
    set_epoch = getattr(sampler, "set_epoch", None)
    if set_epoch is not None:
        # Seed before as well as after, because set_epoch may draw.
        seed_own_generators(sampler, seed, epoch)
        with KeyedDraws(seed, epoch).active():
            set_epoch(epoch)
    seed_own_generators(sampler, seed, epoch)


def length_of(sized: Any) -> int | None:
    """Return the length of a sampler or dataset, or None. A batch sampler needs an inner sampler with a length."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError, OverflowError):  # the last of a length that no sequence can have
        return None


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if not name.startswith("__"))


class SamplerCopy:
    """A copy of a sampler's current attributes, without generators, datasets, models and functions.

    Long containers are copied only if they hold numbers or strings; others are assumed to hold data. Two copies of an
    unchanged sampler have equal serialized `content`.
    """

    def __init__(self, sampler: object) -> None:
        self._sampler = sampler
        buffer = io.BytesIO()
        pickler = _Pickler(buffer, sampler)
        pickler.dump(vars(sampler))
        self._kept = pickler.kept
        self.content = buffer.getvalue()

    def restore(self) -> None:
        """Restore the attributes of the sampler."""
        attributes = _Unpickler(self.content, self._kept).load()
        vars(self._sampler).clear()
        vars(self._sampler).update(attributes)


def copy_of(sampler: object) -> SamplerCopy | None:
    """Return a copy of a sampler's attributes; None if it has no attributes or they cannot be copied."""
    if not hasattr(sampler, "__dict__"):
        return None
    try:
        return SamplerCopy(sampler)
    except (pickle.PicklingError, TypeError, AttributeError):
        return None


class _Pickler(pickle.Pickler):
    """A pickler of a sampler's attributes that sets aside the parts not to copy."""

    def __init__(self, buffer: io.BytesIO, sampler: object) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self._sampler = sampler
        self.kept: list[Any] = []

    def persistent_id(self, obj: Any) -> int | bytes | None:
        """Return the number of a part that is not copied, the pickled bytes of a long container, or else None."""
        if isinstance(obj, CONTAINERS) and len(obj) > LOOKED_THROUGH:  # pyright: ignore[reportUnknownArgumentType]
            if isinstance(next(iter(obj)), (int, float, str, bytes)):  # pyright: ignore[reportUnknownArgumentType]
                return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
        elif obj is not self._sampler and not is_apart(obj):
            return None
        self.kept.append(obj)
        return len(self.kept) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, kept: list[Any]) -> None:
        super().__init__(io.BytesIO(content))
        self._kept = kept

    def persistent_load(self, pid: Any) -> Any:
        """Return the part that a persistent ID stands for."""
        return pickle.loads(pid) if isinstance(pid, bytes) else self._kept[pid]
