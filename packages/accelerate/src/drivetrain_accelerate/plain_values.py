"""Helpers for plain values: names of objects, sizes in bytes, nested dicts and nested attributes."""

from operator import attrgetter
from typing import Any

_STEP = 1024
_UNITS = ("bytes", "KB", "MB", "GB", "TB")


def get_pretty_name(obj: Any) -> str:
    """Return the name of a class or function; for another object, the name of its class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Write a nested dict's values into another, level by level, and return the other."""
    for key, value in source.items():
        if isinstance(value, dict) and isinstance(destination.get(key, {}), dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def convert_bytes(size: float) -> str:
    """Return a number of bytes as text in a suitable unit, such as `1.5 GB`; units are powers of 1,024."""
    for unit in _UNITS:
        if size < _STEP:
            return f"{round(size, 2)} {unit}"
        size /= _STEP
    return f"{round(size, 2)} PB"


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return a nested attribute by its path of names, joined by dots."""
    for name in attr.split("."):
        obj = getattr(obj, name)
    return obj


def shown(path: str, meaning: str, *, is_settable: bool = False) -> Any:
    """Return a property that reads a nested attribute, given as a dotted path from its object."""
    holder, _, name = path.rpartition(".")

    def write(shown_by: Any, value: Any) -> None:
        setattr(attrgetter(holder)(shown_by), name, value)

    return property(attrgetter(path), write if is_settable else None, doc=meaning)
