"""Convert logged values to plain ones: numbers, strings, booleans and None, in dicts and lists."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import TypeAlias, cast

from drivetrain_tracking.errors import ValueNotLoggableError

Plain: TypeAlias = "dict[str, Plain] | list[Plain] | str | int | float | bool | None"


def plain_values(values: Mapping[str, object]) -> dict[str, Plain]:
    """Convert logged values to plain ones.

    Tensors, arrays and scalars of shape () become numbers by their `.item()`, which synchronises with their device.

    Raises:
        ValueNotLoggableError: A value has any other type; the message names its path and type.
    """
    return _mapping(values, ())


def plain_config(config: Mapping[str, object]) -> dict[str, Plain]:
    """Convert a run's configuration to plain values: dataclasses to dicts, paths to strings, enum members to values.

    Raises:
        ValueNotLoggableError: A value has any other type; the message names its path and type.
    """
    return _mapping(cast("Mapping[str, object]", _opened(config)), ())


def _opened(value: object) -> object:
    """Convert the types that only a configuration may hold: dataclasses, enum members, paths and other containers."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _opened(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return _opened(value.value)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _opened(item) for key, item in cast("Mapping[object, object]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_opened(item) for item in cast("Sequence[object]", value)]
    return value


def _plain(value: object, path: tuple[object, ...]) -> Plain:
    if value is None or type(value) in (bool, int, float, str):
        return cast("Plain", value)
    if isinstance(value, Mapping):
        return _mapping(cast("Mapping[object, object]", value), path)
    if isinstance(value, (list, tuple)):
        items = cast("Sequence[object]", value)
        return [_plain(item, (*path, index)) for index, item in enumerate(items)]
    item = getattr(value, "item", None)
    shape = getattr(value, "shape", None)
    if callable(item) and shape is not None:
        if tuple(shape) != ():
            raise _refusal(path, value, f"has shape {tuple(shape)}: log .mean().item() of it, or .tolist()")
        return _plain(item(), path)
    for kind in (bool, int, float, str):  # subclasses, such as the members of an IntEnum
        if isinstance(value, kind):
            return kind(value)
    raise _refusal(
        path, value, "is none that can be logged: log numbers, strings, booleans, or dicts of them; an Image, Table or other medium "
        "by a name of its own, not within a dict"
    )


def _mapping(
    values: Mapping[object, object] | Mapping[str, object], path: tuple[object, ...]
) -> dict[str, Plain]:
    for key in values:
        if not isinstance(key, str):
            raise _refusal((*path, key), key, "is no name: the keys of what is logged are strings")
    return {str(key): _plain(value, (*path, key)) for key, value in values.items()}


def _refusal(path: tuple[object, ...], value: object, why: str) -> ValueNotLoggableError:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return ValueNotLoggableError(f"values{''.join(f'[{key!r}]' for key in path)}: this {name} {why}")
