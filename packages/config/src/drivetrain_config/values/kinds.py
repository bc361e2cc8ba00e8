"""The types of fields: their members and choices, their description in words, their values in JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Value = TypeVar("Value")

_WORDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    Path: "a path",
    NoneType: "null",
}

# The most levels of nested mappings and lists: far more than any setting needs.
MOST_LEVELS = 100


def check_depth(value: Value) -> Value:
    """Return a value; RecursionError if lists and mappings have more than `MOST_LEVELS` levels, except in cycles."""
    seen: set[int] = set()
    level: list[object] = [value]
    for _ in range(MOST_LEVELS + 1):
        holders = [each for each in level if isinstance(each, (list, tuple, Mapping))]
        new = {id(each): each for each in holders if id(each) not in seen}
        if not new:
            return value
        seen.update(new)
        level = []
        for each in new.values():
            level += each.values() if isinstance(each, Mapping) else each
    raise RecursionError(f"more than {MOST_LEVELS} levels")


def field_types(section: type[Any]) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name, with postponed annotations resolved."""
    hints = get_type_hints(section)
    return {field.name: hints[field.name] for field in fields(section) if field.init}


def is_union(kind: Any) -> bool:
    """Return whether a type is a union such as `A | B` or `Optional[A]`."""
    return get_origin(kind) in (Union, UnionType)


def members(kind: Any) -> tuple[Any, ...]:
    """Return the types in a union, without None; for other types, the type itself."""
    if not is_union(kind):
        return (kind,)
    return tuple(member for member in get_args(kind) if member is not NoneType)


def is_optional(kind: Any) -> bool:
    """Return whether a type is a union that includes None."""
    return is_union(kind) and NoneType in get_args(kind)


def is_enum(kind: Any) -> bool:
    """Return whether a type is an enumeration."""
    return isinstance(kind, type) and issubclass(kind, Enum)


def is_sequence(kind: Any) -> bool:
    """Return whether a type is a tuple, a list or `Sequence`."""
    return (get_origin(kind) or kind) in (tuple, list, Sequence)


def is_mapping(kind: Any) -> bool:
    """Return whether a type is a dict or `Mapping`."""
    return (get_origin(kind) or kind) in (dict, Mapping)


def item_kinds(kind: Any) -> tuple[Any, ...] | None:
    """Return the type of each item of a sequence of fixed length, such as `tuple[int, str]`; else None."""
    arguments = get_args(kind)
    if get_origin(kind) is not tuple or Ellipsis in arguments:
        return None
    return arguments


def item_kind(kind: Any) -> Any:
    """Return the type of all items of a sequence, or of all values of a mapping."""
    arguments: tuple[Any, ...] = get_args(kind)
    if is_sequence(kind):
        return arguments[0] if arguments else Any
    return arguments[1] if arguments else Any


def choices(kind: Any) -> tuple[Any, ...] | None:
    """Return the allowed values of a type that is a closed list, without the value None; else None."""
    found: list[Any] = []
    for member in members(kind):
        if get_origin(member) is Literal:
            found += [choice for choice in get_args(member) if choice is not None]
        elif is_enum(member):
            found += [item.value for item in member]
        else:
            return None
    return tuple(found)


def holds_secret(kind: Any) -> bool:
    """Return whether a type contains a dataclass with a secret field."""
    if is_dataclass(kind):
        types = field_types(kind)  # pyright: ignore[reportArgumentType]  # a type, not an instance
        return any(f.metadata.get("secret") or holds_secret(types[f.name]) for f in fields(kind) if f.init)
    return any(holds_secret(argument) for argument in get_args(kind))


def describe(kind: Any) -> str:
    """Describe a type in words, as in "must be an integer or null"."""
    if is_union(kind):
        return " or ".join([*map(describe, members(kind)), *(["null"] if is_optional(kind) else [])])
    if (known := choices(kind)) is not None:
        words = [repr(choice) for choice in known]
        return words[0] if len(words) == 1 else f"one of {', '.join(words)}"
    if is_sequence(kind):
        fixed = item_kinds(kind)
        if fixed is not None:
            return f"a list of {len(fixed)}: {', '.join(map(describe, fixed))}"
        return f"a list, each item {describe(item_kind(kind))}"
    if is_dataclass(kind):
        return f"a mapping with {', '.join(field_types(kind))}"  # pyright: ignore[reportArgumentType]
    if is_mapping(kind):
        return f"a mapping, each value {describe(item_kind(kind))}"
    return "anything" if kind is Any else _WORDS.get(kind, getattr(kind, "__name__", str(kind)))


def plain(value: Any) -> Any:
    """Convert a value to JSON's types; `convert` restores an equal value from them."""
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(plain(key)): plain(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    raise TypeError(f"{value!r} is of type {type(value).__name__}, which no setting has")


def shown(value: Any) -> str:
    """Format a value for a line of help or a table."""
    if value is None:
        return "not set"
    if value in ((), [], {}):
        return "empty"
    written = plain(value)
    return str(written).lower() if isinstance(written, bool) else str(written)
