"""Convert values to a field's type: parse text from flags and variables, check all other values."""

import json
import operator
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from drivetrain_config.values.kinds import (
    MOST_LEVELS,
    check_depth,
    choices,
    describe,
    field_types,
    is_enum,
    is_mapping,
    is_optional,
    is_sequence,
    is_union,
    item_kind,
    item_kinds,
    members,
)
from drivetrain_messages import suggest

_BOOLS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
_NULLS = ("none", "null")


class ConversionError(ValueError):
    """An error for a value of the wrong type; the message names the allowed values, not the source."""


def convert(value: Any, kind: Any, *, text: bool = False) -> Any:
    """Convert a value to a plain type, Path, Literal, Enum, tuple, list, dict, dataclass, None, or a union of these.

    With `text`, strings are parsed as on a command line: "3" is a number, "true" a bool, "a,b" a list, "none" is
    None. ConversionError, with the allowed values, if the value does not fit.
    """
    if kind is Any:
        return value
    if is_union(kind):
        return _convert_union(value, kind, text)
    if get_origin(kind) is Literal or is_enum(kind):
        return _convert_choice(value, kind, text)
    if is_sequence(kind):
        return _convert_sequence(value, kind, text)
    if is_mapping(kind):
        kinds = get_args(kind) or (str, Any)
        found, text = _mapping(value, text)
        if found is None:
            raise ConversionError("must be a mapping; as text it is JSON, or key=value pairs between commas")
        # Keys are text in every file format, whatever their type.
        return {
            _convert_inside("key", key, kinds[0], True): _convert_inside(str(key), item, kinds[1], text)
            for key, item in found.items()
        }
    if is_dataclass(kind):
        return _convert_dataclass(value, kind, text)
    return _convert_plain(value, kind, text)


def _convert_plain(value: Any, kind: Any, text: bool) -> Any:
    if kind is bool:
        found = _BOOLS.get(value.lower()) if text and isinstance(value, str) else value
        valid = isinstance(found, bool)
    elif kind is int:
        found = _integer(value, text)
        valid = found is not None
    elif kind is float:
        # Parse text from files too: YAML 1.1 reads 1e-4 as text, because it has no decimal point.
        try:
            found = None if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            found = None
        valid = found is not None
    elif kind is Path:
        found = Path(value).expanduser() if isinstance(value, str) and value else value
        valid = isinstance(found, Path)
    elif isinstance(kind, type):
        found, valid = value, isinstance(value, kind)
    else:
        raise TypeError(f"{kind} is not a type that a setting may have")
    if valid:
        return found
    hint = ""
    if not text and kind is str and isinstance(value, (bool, int, float)):
        hint = "; put it in quotes"
    elif not text and isinstance(value, str):
        is_spelled = (
            value.lower() in _BOOLS if kind is bool else kind is int and _integer(value, True) is not None
        )
        hint = "; take it out of its quotes" if is_spelled else ""
    raise ConversionError(f"must be {describe(kind)}{hint}")


def _integer(value: Any, text: bool) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return int(value) if text and isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError):
        return None


def _convert_union(value: Any, kind: Any, text: bool) -> Any:
    options = members(kind)
    is_spelled = text and isinstance(value, str)
    for option in options:  # no earlier member may convert a value that has the type of a later one
        if get_origin(option) is Literal:
            is_exact = any(_is_choice(value, choice, text) for choice in get_args(option))
        else:
            is_exact = type(value) is option and not is_spelled
        if is_exact:
            return convert(value, option, text=text)
    if is_optional(kind) and (value is None or (text and str(value).lower() in _NULLS)):
        return None
    if len(options) == 1 and (is_sequence(options[0]) or is_mapping(options[0]) or is_dataclass(options[0])):
        return convert(value, options[0], text=text)  # its message says which item is wrong
    for option in sorted(options, key=lambda option: option in (str, Path)):  # last: these accept any text
        try:
            return convert(value, option, text=text)
        except ConversionError:
            continue
    raise ConversionError(f"must be {describe(kind)}")


def _convert_choice(value: Any, kind: Any, text: bool) -> Any:
    if is_enum(kind):
        for member in kind:
            if value is member or value == member.name or _is_choice(value, member.value, text):
                return member
    else:
        known = get_args(kind)
        for choice in known:
            if _is_choice(value, choice, text):
                return choice
        if isinstance(value, bool):  # YAML 1.1 reads a bare no, off, yes or on as a bool
            spelled = [choice for choice in known if isinstance(choice, str) and _BOOLS.get(choice) is value]
            if len(spelled) == 1:
                return spelled[0]
    raise ConversionError(f"must be {describe(kind)}{suggest(str(value), map(str, choices(kind) or ()))}")


def _is_choice(value: Any, choice: Any, text: bool) -> bool:
    return (type(value) is type(choice) and value == choice) or (text and value == str(choice))


def _convert_sequence(value: Any, kind: Any, text: bool) -> Any:
    if isinstance(value, str):
        # A file may hold `log_with: jsonl` for a list of one item.
        items = _json(value) if value.lstrip().startswith("[") else None
        in_commas = [part for piece in value.split(",") if (part := piece.strip())]
        value, text = (items if isinstance(items, list) else in_commas), True
    if not isinstance(value, (list, tuple)):
        raise ConversionError(f"must be {describe(kind)}; as text its items stand between commas")
    fixed = item_kinds(kind)
    kinds = (item_kind(kind),) * len(value) if fixed is None else fixed
    if len(kinds) != len(value):
        raise ConversionError(f"must be {describe(kind)}; there are {len(value)}")
    items = [
        _convert_inside(f"item {i}", v, k, text) for i, (v, k) in enumerate(zip(value, kinds, strict=True))
    ]
    return items if (get_origin(kind) or kind) is list else tuple(items)


def _convert_dataclass(value: Any, kind: Any, text: bool) -> Any:
    if isinstance(value, kind):
        return value
    types = field_types(kind)
    value, text = _mapping(value, text)
    if value is None:
        raise ConversionError(
            f"must be {describe(kind)}; as text it is JSON, or key=value pairs between commas"
        )
    for name in value:
        if name not in types:
            raise ConversionError(f"has no {name!r}{suggest(name, types)}; allowed are {', '.join(types)}")
    for field in fields(kind):
        if field.init and field.name not in value and field.default is field.default_factory is MISSING:
            raise ConversionError(f"needs {field.name!r}, {describe(types[field.name])}")
    given = {name: _convert_inside(name, item, types[name], text) for name, item in value.items()}
    try:
        return kind(**given)
    except ValueError as error:
        raise ConversionError(str(error)) from error


def _convert_inside(label: str, value: Any, kind: Any, text: bool) -> Any:
    try:
        return convert(value, kind, text=text)
    except ConversionError as error:
        raise ConversionError(f"{label}, {value!r}, {error}") from error


def _mapping(value: Any, text: bool) -> tuple[Mapping[Any, Any] | None, bool]:
    """Return a value as a mapping (None if it is no mapping), and whether the mapping's values are text."""
    if not (text and isinstance(value, str)):
        return (value if isinstance(value, Mapping) else None), False
    if isinstance(found := _json(value), Mapping):
        return found, False
    pairs = [part.partition("=") for part in value.split(",") if part.strip()]
    return ({k.strip(): v.strip() for k, _, v in pairs}, True) if all(p[1] for p in pairs) else (None, True)


def _json(value: str) -> Any:
    try:
        return check_depth(json.loads(value))
    except ValueError:
        return None
    except RecursionError:
        raise ConversionError(f"is nested too deeply: {MOST_LEVELS} levels are allowed") from None
