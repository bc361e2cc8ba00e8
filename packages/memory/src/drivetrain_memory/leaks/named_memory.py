"""The memory that Python objects hold, by the name under which a user reaches them.

Objects are walked from the user's names outwards, breadth first: an object counts for the name with the shortest path
to it. All elements of a container share one name, `losses[*]`: a growing container is one name with a growing count.
The saved tensors of autograd graphs are not Python objects; their nodes are counted.
"""

import gc
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
)
from typing import Any

from torch import Tensor, nn

from drivetrain_memory.compat import MODULE_TABLES
from drivetrain_memory.leaks.roots import Names, find_names, locals_of
from drivetrain_memory.storages import LiveStorage, storage_of

GRAPH = "autograd graph"
_TENSOR_BYTES = 320  # beside its elements, as measured: its Python object, TensorImpl, sizes and strides
_MOST_PARTS = 9  # of a name; longer paths keep the first ones
_SKIPPED = (ModuleType, CodeType, BuiltinFunctionType, bool, type(None), type(Ellipsis), type(NotImplemented))
_OWN = "drivetrain_memory.leaks"  # holds measurements of its own
_LEAVES = (int, float, complex, str, bytes, bytearray)
_SEQUENCES = (list, tuple, set, frozenset, deque)


@dataclass(slots=True)
class Holding:
    """The objects of one type under one name."""

    count: int = 0
    bytes: int = 0  # with the storages of tensors, each counted once
    samples: deque[Any] = field(default_factory=lambda: deque[Any](maxlen=4))  # the newest of a container


Census = dict[tuple[str, str], Holding]  # by name and type


class _Walk:
    """A walk over all objects that have a name."""

    def __init__(self, names: Names) -> None:
        self._users_modules = names.users_modules
        self.found: Census = {}
        self.seen: set[int] = set()
        self._storages: set[LiveStorage] = set()
        self._kept: list[Any] = []  # objects made by the walk: their ids must not be given again

    def run(self, roots: Iterable[tuple[str, Any]]) -> None:
        queue = deque((value, name, 0) for name, value in roots)
        while queue:
            value, name, depth = queue.popleft()
            kind = type(value)  # asked in place of isinstance, which reads attributes of proxies
            if id(value) in self.seen or issubclass(kind, _SKIPPED) or str(kind.__module__).startswith(_OWN):
                continue
            self.seen.add(id(value))
            holding = self.found.setdefault((name, kind.__name__), Holding())
            holding.count += 1
            holding.samples.append(value)
            if issubclass(kind, Tensor):
                holding.bytes += _TENSOR_BYTES
                if (storage := storage_of(value)) is not None and storage not in self._storages:
                    self._storages.add(storage)
                    holding.bytes += storage.size_bytes
                if value.grad_fn is not None:
                    self._count_graph(value, name)
            elif not issubclass(kind, type):
                holding.bytes += sys.getsizeof(value, 0)
            if issubclass(kind, _LEAVES):
                continue
            for step, held in self._iter_referents(value):
                added = step if depth < _MOST_PARTS else ""
                queue.append((held, name + added, depth + (added != "")))

    def _count_graph(self, tensor: Tensor, name: str) -> None:
        holding = self.found.setdefault((name, GRAPH), Holding())
        holding.samples.append(tensor)
        pending: list[Any] = [tensor.grad_fn]
        while pending:
            node = pending.pop()
            if node is None or id(node) in self.seen:
                continue
            self.seen.add(id(node))
            self._kept.append(node)
            holding.count += 1
            pending += [after for after, _ in node.next_functions]

    def _iter_referents(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield the objects that an object refers to, with the suffixes for their names."""
        kind = type(value)
        if issubclass(kind, dict):
            for key, held in list(value.items()):
                yield "[*]", held
                yield "[*] (key)", key
        elif issubclass(kind, _SEQUENCES):
            yield from (("[*]", held) for held in list(value))
        elif issubclass(kind, FunctionType):
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
                try:
                    yield f" (closure: {name})", cell.cell_contents
                except ValueError:  # not yet assigned
                    continue
            yield from ((".__defaults__[*]", held) for held in value.__defaults__ or ())
            yield from ((f".{name}", held) for name, held in list(vars(value).items()))
        elif issubclass(kind, MethodType):
            yield ".__self__", value.__self__
            yield "", value.__func__
        elif issubclass(kind, (FrameType, GeneratorType, CoroutineType)):
            frame = getattr(value, "gi_frame", None) or getattr(value, "cr_frame", None) or value
            own = "drivetrain_memory"
            if isinstance(frame, FrameType) and not frame.f_globals.get("__name__", "").startswith(own):
                yield from ((f" local {name}", held) for name, held in locals_of(frame).items())
        elif issubclass(kind, type):
            if value.__module__ in self._users_modules:
                yield from (
                    (f".{name}", held) for name, held in list(vars(value).items()) if name[:2] != "__"
                )
        else:
            yield from self._iter_attributes(value)

    def _iter_attributes(self, value: Any) -> Iterator[tuple[str, Any]]:
        attributes, kind = _attributes(value), type(value)
        if issubclass(kind, nn.Module):
            for table in MODULE_TABLES & attributes.keys():
                yield from ((f".{name}", held) for name, held in list(attributes[table].items()))
                self.seen.add(id(attributes[table]))
        elif issubclass(kind, Tensor) and value.is_leaf:
            yield ".grad", value.grad
        yield from ((f".{name}", held) for name, held in list(attributes.items()))
        self.seen.add(id(attributes))
        for held in gc.get_referents(value):  # slots, and what objects of C hold
            if isinstance(held, CellType):
                yield "", held.cell_contents
            elif not isinstance(held, type):
                yield "", held


def _attributes(value: Any) -> Mapping[str, Any]:
    """Return an object's own attributes without running any code of its class."""
    if not type(value).__dictoffset__:
        return {}
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def take_census() -> Census:
    """Count all objects that a user's name reaches, and the entries of containers in modules of libraries."""
    names = find_names()
    walk = _Walk(names)
    walk.run(names.users)
    for name, container in names.of_libraries:
        if id(container) not in walk.seen:
            is_cache = not hasattr(type(container), "__len__")
            length = int(container.cache_info().currsize) if is_cache else len(container)
            walk.found[name, "entry"] = Holding(count=length, bytes=sys.getsizeof(container, 0))
    return walk.found
