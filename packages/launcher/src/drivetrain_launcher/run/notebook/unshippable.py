"""Find the smallest part of an object that cannot be pickled, and the path to it."""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, cast

# The names of types, and what to do instead of shipping one of their instances.
_REMEDIES: Mapping[str, str] = {
    "generator": "make it inside the function, or ship a list of its items",
    "_io.TextIOWrapper": "open the file inside the function, from its path",
    "_io.BufferedReader": "open the file inside the function, from its path",
    "_io.BufferedWriter": "open the file inside the function, from its path",
    "_io.FileIO": "open the file inside the function, from its path",
    "socket.socket": "connect inside the function",
    "sqlite3.Connection": "connect inside the function",
    "torch.Generator": "make the generator inside the function, from a seed",
}
_REMEDY = "create it inside the function"
_DEEPEST = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A part of an object.

    Attributes:
        label: The way in which its owner refers to it: `.name`, `['key']`, `[0]`, `closure 'name'`.
        value: The part of the object.
    """

    label: str
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """A part that cannot be pickled, though each of its own parts can.

    Attributes:
        path: The way from the root to the part and its type, such as
            "train -> closure 'loader' -> ._lock -> _thread.lock".
        reason: The error of pickling it.
        remedy: The advice to the user.
    """

    path: str
    reason: str
    remedy: str


def find_culprit(root: Named, pickle: Callable[[Any], object]) -> Culprit | None:
    """Return the culprit inside an object; None if it can be pickled.

    Args:
        root: The object to search.
        pickle: A function that pickles an object, and raises if that is not possible.
    """
    reason = _refusal(root.value, pickle)
    if reason is None:
        return None
    labels, value, seen = [root.label], root.value, {id(root.value)}
    while len(labels) < _DEEPEST:
        found = _first_refused(value, pickle, seen)
        if found is None:
            break
        part, reason = found
        seen.add(id(part.value))
        labels.append(part.label)
        value = part.value
    kind = _type_name(value)
    return Culprit(path=" -> ".join([*labels, kind]), reason=reason, remedy=_REMEDIES.get(kind, _REMEDY))


def _first_refused(value: Any, pickle: Callable[[Any], object], seen: set[int]) -> tuple[Named, str] | None:
    for part in parts_of(value):
        if id(part.value) not in seen and (reason := _refusal(part.value, pickle)) is not None:
            return part, reason
    return None


def _refusal(value: Any, pickle: Callable[[Any], object]) -> str | None:
    """Return the error of pickling an object in one line; None if there is none."""
    try:
        pickle(value)
    except Exception as error:  # noqa: BLE001 - any class may raise anything, which is then reported
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return None


def parts_of(value: Any) -> list[Named]:
    """Return the parts of an object that are pickled with it, named as its owner refers to them."""
    if isinstance(value, FunctionType):
        return list(_parts_of_function(value))
    if isinstance(value, functools.partial):
        partial = cast("functools.partial[Any]", value)
        return [
            Named(label="the function of a partial", value=partial.func),
            *(Named(label=f"argument {place}", value=item) for place, item in enumerate(partial.args)),
            *(Named(label=f"argument {key!r}", value=item) for key, item in partial.keywords.items()),
        ]
    if isinstance(value, MethodType):
        return [Named(label="self", value=value.__self__), *parts_of(value.__func__)]
    if isinstance(value, Mapping):
        return [
            Named(label=f"[{key!r}]", value=item) for key, item in cast("Mapping[Any, Any]", value).items()
        ]
    if isinstance(value, (list, tuple, set, frozenset)):
        items: tuple[Any, ...] = tuple(cast("Any", value))
        return [
            *(Named(label=f"[{place}]", value=item) for place, item in enumerate(items)),
            *_attributes(value),
        ]
    if isinstance(value, type):
        return [Named(label=f".{name}", value=_unwrapped(item)) for name, item in vars(value).items()]
    if isinstance(value, (ModuleType, GeneratorType, CodeType)):
        return []
    return _attributes(value)


def _parts_of_function(function: FunctionType) -> Iterator[Named]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield Named(label=f"closure {name!r}", value=cell.cell_contents)
        except ValueError:  # the cell is still empty
            continue
    for name in sorted(_names_used(function.__code__) & function.__globals__.keys()):
        yield Named(label=f"global {name!r}", value=function.__globals__[name])
    for place, default in enumerate(function.__defaults__ or ()):
        yield Named(label=f"default {place}", value=default)
    for name, default in (function.__kwdefaults__ or {}).items():
        yield Named(label=f"default of {name!r}", value=default)
    yield from _attributes(function)


def _names_used(code: CodeType) -> set[str]:
    """Return the names that a function and those nested in it look up."""
    nested = [_names_used(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*nested)


def _attributes(value: Any) -> list[Named]:
    """Return the attributes that pickle would write: the object's state, if it gives one."""
    state: Any = getattr(value, "__dict__", {})
    if type(value).__reduce_ex__ is object.__reduce_ex__ and type(value).__reduce__ is object.__reduce__:
        try:
            state = value.__getstate__()
        except Exception:  # noqa: BLE001 - the refusal of the object itself is what is reported
            return []
    tables = state if isinstance(state, tuple) else (state,)
    return [
        Named(label=f".{name}", value=item)
        for table in cast("tuple[Any, ...]", tables)
        if isinstance(table, Mapping)
        for name, item in cast("Mapping[Any, Any]", table).items()
    ]


def _unwrapped(item: Any) -> Any:
    """Return the function of a method, a property's getter included, as far as there is one."""
    if isinstance(item, (staticmethod, classmethod)):
        return cast("Any", item).__func__
    return item.fget if isinstance(item, property) and item.fget is not None else item


def _type_name(value: Any) -> str:
    if isinstance(value, ModuleType):
        return f"module {value.__name__}"
    kind = cast("type[Any]", type(value))
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    top = kind.__module__.partition(".")[0]
    public = getattr(sys.modules.get(top), kind.__name__, None)
    return f"{top}.{kind.__name__}" if public is kind else f"{kind.__module__}.{kind.__qualname__}"
