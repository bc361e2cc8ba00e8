"""Values brought to a field's type: text from flags and variables is parsed, values from files are checked."""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


class WrongTypeError(ValueError):
    """A value is not of the field's type; the message says what is allowed."""


def convert(value: Any, kind: Any) -> Any:
    """Bring a value to a type.

    Args:
        value: Text (from a flag or variable), or what a file's parser or JSON made of it.
        kind: The field's type: bool, int, float, str, Path, Literal, Enum, tuple, list, dict, a frozen dataclass, a
            union of these, None among them.

    Raises:
        WrongTypeError: It cannot be; the message says what is allowed.
    """
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return _convert_union(value, get_args(kind))
    if origin is Literal:
        return _convert_literal(value, get_args(kind))
    if origin in (tuple, list):
        return _convert_sequence(value, origin, get_args(kind))
    if origin is dict or kind is dict:
        return _convert_mapping(value, get_args(kind) or (str, Any))
    if is_dataclass(kind):
        return _convert_dataclass(value, kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _convert_enum(value, kind)
    return value if kind is Any else _convert_plain(value, kind)


def field_types(section: type[Any]) -> dict[str, Any]:
    """The types of a dataclass's fields by name, with postponed annotations resolved."""
    hints = get_type_hints(section)
    return {field.name: hints[field.name] for field in fields(section)}


def describe(kind: Any) -> str:
    """A type in words, for messages and tables."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join("null" if a is NoneType else describe(a) for a in arguments)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (tuple, list):
        return f"a list of {describe(arguments[0])}" if arguments else "a list"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(str(member.value) for member in kind)}"
    names = {bool: "true or false", int: "an integer", float: "a number", str: "text", Path: "a path"}
    return names.get(kind, "a mapping" if origin is dict or kind is dict or is_dataclass(kind) else str(kind))


def _convert_plain(value: Any, kind: type[Any]) -> Any:
    match kind:
        case _ if kind is bool:
            found = value if isinstance(value, bool) else _bool_of(value)
        case _ if kind is int:
            found = _number(value, int)
        case _ if kind is float:
            found = _number(value, float)
        case _ if kind is Path:
            found = Path(value) if isinstance(value, (str, Path)) and str(value) else None
        case _ if kind is str:
            found = value if isinstance(value, str) else None
        case _:
            found = value if isinstance(value, kind) else None
    if found is None:
        raise WrongTypeError(f"must be {describe(kind)}")
    return found


def _bool_of(value: Any) -> bool | None:
    text = value.lower() if isinstance(value, str) else None
    return True if text in _TRUE else False if text in _FALSE else None


def _number(value: Any, kind: type[int] | type[float]) -> int | float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if kind is int and isinstance(value, float):
        return None
    try:
        return kind(value)
    except ValueError:
        return None


def _convert_union(value: Any, members: tuple[Any, ...]) -> Any:
    if NoneType in members and (
        value is None or (isinstance(value, str) and value.lower() in ("none", "null"))
    ):
        return None
    for member in members:
        if member is NoneType:
            continue
        try:
            return convert(value, member)
        except WrongTypeError:
            continue
    raise WrongTypeError(f"must be {' or '.join('null' if m is NoneType else describe(m) for m in members)}")


def _convert_literal(value: Any, choices: tuple[Any, ...]) -> Any:
    for choice in choices:
        if value == choice and type(value) is type(choice):
            return choice
        if isinstance(value, str) and not isinstance(choice, str) and value == str(choice):
            return choice
    if value is False and "no" in choices:  # YAML 1.1 reads a bare `no` as false
        return "no"
    raise WrongTypeError(f"must be one of {', '.join(map(repr, choices))}")


def _convert_sequence(value: Any, origin: type[Any], arguments: tuple[Any, ...]) -> Any:
    if isinstance(value, str):
        value = (
            json.loads(value)
            if value.startswith("[")
            else [part.strip() for part in value.split(",") if part.strip()]
        )
    if not isinstance(value, (list, tuple)):
        raise WrongTypeError("must be a list, or text with commas")
    kind = arguments[0] if arguments else Any
    return origin(convert(item, kind) for item in value)


def _convert_mapping(value: Any, arguments: tuple[Any, ...]) -> dict[Any, Any]:
    value = _parsed(value)
    if not isinstance(value, Mapping):
        raise WrongTypeError("must be a mapping, or one as JSON text")
    return {convert(key, arguments[0]): convert(item, arguments[1]) for key, item in value.items()}


def _convert_dataclass(value: Any, kind: Any) -> Any:
    if isinstance(value, kind):
        return value
    value = _parsed(value)
    if not isinstance(value, Mapping):
        raise WrongTypeError(f"must be a mapping of {', '.join(field_types(kind))}")
    types = field_types(kind)
    if unknown := sorted(set(map(str, value)) - set(types)):
        raise WrongTypeError(f"has no {', '.join(unknown)}; allowed are {', '.join(types)}")
    return kind(**{str(name): convert(item, types[str(name)]) for name, item in value.items()})


def _convert_enum(value: Any, kind: type[Enum]) -> Enum:
    for member in kind:
        if value is member or value == member.value or value == member.name:
            return member
    raise WrongTypeError(f"must be {describe(kind)}")


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
