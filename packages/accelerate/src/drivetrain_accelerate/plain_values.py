"""Show, join and look into plain values: names of objects, sizes, nested dicts and attributes."""

from operator import attrgetter
from typing import Any

_STEP = 1024
_UNITS = ("bytes", "KB", "MB", "GB", "TB")


def get_pretty_name(obj: Any) -> str:
    """Return the name of a class or function, or that of an object's class."""
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
    """Return a number of bytes in the unit that suits it, such as `1.5 GB`, of 1,024 steps."""
    for unit in _UNITS:
        if size < _STEP:
            return f"{round(size, 2)} {unit}"
        size /= _STEP
    return f"{round(size, 2)} PB"


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return the attribute of an attribute, by names that are joined by dots."""
    for name in attr.split("."):
        obj = getattr(obj, name)
    return obj


def shown(path: str, meaning: str, *, is_settable: bool = False) -> Any:
    """Return a property whose value stands at a path of dots from its object."""
    holder, _, name = path.rpartition(".")

    def write(shown_by: Any, value: Any) -> None:
        setattr(attrgetter(holder)(shown_by), name, value)

    return property(attrgetter(path), write if is_settable else None, doc=meaning)
