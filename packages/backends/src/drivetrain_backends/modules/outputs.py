"""The tensors in the output of a forward."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, cast

from torch import Tensor


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested mappings, sequences and dataclasses."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in cast("Mapping[Any, Any]", output).values():
            yield from tensors_in(value)
    elif isinstance(output, (list, tuple)):
        for value in cast("list[Any]", output):
            yield from tensors_in(value)
    elif is_dataclass(output):
        for field in fields(output):
            yield from tensors_in(getattr(output, field.name))
