"""Walk the lists, tuples and dicts of an operation's arguments and results."""

from collections.abc import Callable, Iterator
from typing import Any, cast

from torch import Tensor


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in cast("list[object]", value):
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in cast("dict[str, object]", value).values():
            yield from tensors_in(item)


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return nested lists, tuples and dicts with their tensors changed; named tuples stay as they are."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in cast("dict[Any, Any]", value).items()}
    return value
