"""Convert logged values to plain ones: numbers, strings, booleans and None, in dicts and lists."""

import logging
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from hashlib import sha256
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

from drivetrain_tracking.errors import ValueNotLoggableError
from drivetrain_tracking.values.secret_masking import MASK, mask_config, mask_text

logger = logging.getLogger(__name__)

MARK_DIGITS = 8

# The types of most logged values: they are plain, and neither media nor on a device. Subclasses are looked at.
PLAIN_TYPES: frozenset[type] = frozenset({bool, int, float, str, type(None)})

Plain: TypeAlias = "dict[str, Plain] | list[Plain] | str | int | float | bool | None"


def are_plain(values: Mapping[Any, object]) -> bool:
    """Return whether all values of a mapping are of `PLAIN_TYPES`, by one fast pass in C."""
    return PLAIN_TYPES.issuperset(map(type, values.values()))


def plain_values(values: Mapping[str, object]) -> dict[str, Plain]:
    """Convert logged values to plain ones.

    Tensors, arrays and scalars of shape () become numbers by their `.item()`, which synchronises with their device.

    Raises:
        ValueNotLoggableError: A value has any other type; the message names its path and type.

    Example:
        >>> import torch
        >>> plain_values({"loss": torch.tensor(0.5), "lr": 1})
        {'loss': 0.5, 'lr': 1}
    """
    return _mapping(values, ())


def mark_of(given: str) -> str:
    """Return the mark of a name: hexadecimal digits of its hash."""
    return sha256(given.encode(errors="surrogatepass")).hexdigest()[:MARK_DIGITS]


def plain_config(config: Any, *, tells: bool = True) -> dict[str, Plain]:
    """Convert a run's configuration to plain values, with its secrets masked.

    Dataclasses, namespaces, objects of attrs, and objects with `model_dump` or `to_dict` become dicts, paths strings,
    enum members their values, sets sorted lists. Any other object becomes its text: a configuration is there to be
    read. Keys become strings. If two keys have the same text, such as 1 and "1", the string key stays, and the other
    key gets a mark.

    Args:
        config: A mapping, or an object that becomes one.
        tells: Whether to warn of keys that got a mark; true on one rank.

    Raises:
        ValueNotLoggableError: The configuration is not a mapping and cannot become a mapping.
    """
    marked: list[str] = []
    opened = _open_value(config, marked)
    if not isinstance(opened, dict):
        raise ValueNotLoggableError(
            f"config={config!r}: allowed are a mapping, a dataclass, a namespace, and objects with model_dump or "
            "to_dict"
        )
    if marked and tells:
        logger.warning("keys of a configuration that have one text are shown apart: %s", ", ".join(marked))
    return cast("dict[str, Plain]", mask_config(opened))


def _open_value(value: Any, marked: list[str]) -> Plain:
    """Convert one value of a configuration; `marked` gets a text for each key that got a mark."""
    if type(value) in PLAIN_TYPES:
        return value
    for kind, opener in _OPENERS:
        if isinstance(value, kind):
            return opener(value, marked)
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        return _open_value(value.item(), marked)
    for method in ("model_dump", "to_dict"):
        if not isinstance(value, type) and callable(getattr(value, method, None)):
            return _open_value(getattr(value, method)(), marked)
    if is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: MASK
            if field.metadata.get("secret")
            else _open_value(getattr(value, field.name), marked)
            for field in fields(value)
        }
    if (attributes := getattr(type(value), "__attrs_attrs__", None)) is not None:  # of a class of attrs
        return {
            attribute.name: _open_value(getattr(value, attribute.name), marked) for attribute in attributes
        }
    return getattr(value, "__qualname__", None) or mask_text(str(value)[:_LONGEST_REPR])


def _open_items(value: Iterable[Any], marked: list[str]) -> list[Plain]:
    return [_open_value(item, marked) for item in value]


def _open_mapping(value: Mapping[Any, Any], marked: list[str]) -> Plain:
    strings = {key for key in value if type(key) is str}
    named: dict[str, Plain] = {}
    for key, item in value.items():
        name = str(key)
        while type(key) is not str and (name in strings or name in named):
            name = f"{name}-{mark_of(f'{type(key).__qualname__} {name}')}"
        if name != str(key):
            marked.append(f"{key!r} as {name!r}")
        named[name] = _open_value(item, marked)
    return named


_LONGEST_REPR = 1000  # characters of an object of no known kind
_OPENERS: tuple[tuple[type | tuple[type, ...], Callable[[Any, list[str]], Plain]], ...] = (
    (Enum, lambda value, marked: _open_value(value.value, marked)),
    (Mapping, _open_mapping),
    ((Namespace, SimpleNamespace), lambda value, marked: _open_value(vars(value), marked)),
    ((list, tuple), _open_items),
    ((PurePath, str, bytes, bytearray, range), lambda value, _: str(value)),
    (Sequence, _open_items),  # such as a list of OmegaConf
    ((set, frozenset), lambda value, marked: sorted(_open_items(value, marked), key=str)),
)


def _plain(value: object, path: tuple[object, ...]) -> Plain:
    if type(value) in PLAIN_TYPES:
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
        path,
        value,
        "cannot be logged: log numbers, strings, booleans, or dicts of them; an Image, Table or other "
        "medium by a name of its own, not within a dict",
    )


def _mapping(
    values: Mapping[object, object] | Mapping[str, object], path: tuple[object, ...]
) -> dict[str, Plain]:
    for key in values:
        if not isinstance(key, str):
            raise _refusal((*path, key), key, "is no name: the keys of what is logged are strings")
    if are_plain(values):
        return {str(key): cast("Plain", value) for key, value in values.items()}
    return {str(key): _plain(value, (*path, key)) for key, value in values.items()}


def _refusal(path: tuple[object, ...], value: object, why: str) -> ValueNotLoggableError:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return ValueNotLoggableError(f"values{''.join(f'[{key!r}]' for key in path)}: this {name} {why}")
