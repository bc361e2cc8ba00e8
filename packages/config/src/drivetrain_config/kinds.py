"""What a field's type says: its members and choices, how it reads in words, how its values are written as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_WORDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    Path: "a path",
    NoneType: "null",
}

# How many mappings and lists may stand in each other: far more than any setting has.
MOST_LEVELS = 100


def is_too_deep(value: object) -> bool:
    """Return whether lists and mappings stand in each other more than `MOST_LEVELS` deep; one in itself does not."""
    seen: set[int] = set()
    level = [value]
    for _ in range(MOST_LEVELS):
        below: list[object] = []
        for each in level:
            if not isinstance(each, (list, tuple, Mapping)) or id(each) in seen:
                continue
            seen.add(id(each))
            below += each.values() if isinstance(each, Mapping) else each
        if not below:
            return False
        level = below
    return any(isinstance(each, (list, tuple, Mapping)) and id(each) not in seen for each in level)


def field_types(section: type[Any]) -> dict[str, Any]:
    """The types of a dataclass's fields by name, with postponed annotations resolved."""
    hints = get_type_hints(section)
    return {field.name: hints[field.name] for field in fields(section) if field.init}


def is_union(kind: Any) -> bool:
    """Whether a type is `A | B`, `Optional[A]` among them."""
    return get_origin(kind) in (Union, UnionType)


def members(kind: Any) -> tuple[Any, ...]:
    """The types of a union, None left out; a type that is no union stands alone."""
    if not is_union(kind):
        return (kind,)
    return tuple(member for member in get_args(kind) if member is not NoneType)


def is_optional(kind: Any) -> bool:
    """Whether a type is a union that None belongs to."""
    return is_union(kind) and NoneType in get_args(kind)


def is_enum(kind: Any) -> bool:
    """Whether a type is an enumeration."""
    return isinstance(kind, type) and issubclass(kind, Enum)


def is_sequence(kind: Any) -> bool:
    """Whether a type is a tuple or list, or promises to read like one."""
    return (get_origin(kind) or kind) in (tuple, list, Sequence)


def is_mapping(kind: Any) -> bool:
    """Whether a type is a dict, or promises to read like one."""
    return (get_origin(kind) or kind) in (dict, Mapping)


def item_kinds(kind: Any) -> tuple[Any, ...] | None:
    """The types of a sequence's items one by one, where the type fixes their number, as `tuple[int, str]` does."""
    arguments = get_args(kind)
    if get_origin(kind) is not tuple or Ellipsis in arguments:
        return None
    return arguments


def item_kind(kind: Any) -> Any:
    """The type of all items of a sequence, or of all values of a mapping."""
    arguments: tuple[Any, ...] = get_args(kind)
    if is_sequence(kind):
        return arguments[0] if arguments else Any
    return arguments[1] if arguments else Any


def choices(kind: Any) -> tuple[Any, ...] | None:
    """The values there are, where a type is a closed list of them; None left out."""
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
    """Whether a dataclass inside a type marks one of its own fields secret."""
    if is_dataclass(kind):
        types = field_types(kind)  # pyright: ignore[reportArgumentType]  # a type, not an instance
        return any(f.metadata.get("secret") or holds_secret(types[f.name]) for f in fields(kind) if f.init)
    return any(holds_secret(argument) for argument in get_args(kind))


def describe(kind: Any) -> str:
    """A type in words, as in "must be an integer or null"."""
    if is_union(kind):
        return " or ".join([*map(describe, members(kind)), *(["null"] if is_optional(kind) else [])])
    if (known := choices(kind)) is not None:
        words = [repr(choice) for choice in known]
        return words[0] if len(words) == 1 else f"one of {', '.join(words)}"
    if is_sequence(kind):
        return _describe_sequence(kind)
    if is_dataclass(kind):
        return f"a mapping with {', '.join(field_types(kind))}"  # pyright: ignore[reportArgumentType]
    if is_mapping(kind):
        return f"a mapping, each value {describe(item_kind(kind))}"
    return "anything" if kind is Any else _WORDS.get(kind, getattr(kind, "__name__", str(kind)))


def plain(value: Any) -> Any:
    """A value in JSON's own types, from which `convert` makes an equal one.

    Raises:
        TypeError: It is of no type that a setting may have.
    """
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
    """A value in a line of help or a table."""
    if value is None:
        return "not set"
    if value in ((), [], {}):
        return "empty"
    written = plain(value)
    return str(written).lower() if isinstance(written, bool) else str(written)


def _describe_sequence(kind: Any) -> str:
    fixed = item_kinds(kind)
    if fixed is not None:
        return f"a list of {len(fixed)}: {', '.join(map(describe, fixed))}"
    return f"a list, each item {describe(item_kind(kind))}"
