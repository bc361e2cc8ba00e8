"""Assign loaded values to a model; all changes are prepared first, so that applying them cannot fail."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from drivetrain_dispatch.model.stored_tensor import StoredTensor, stored_tensor


class Assignment(NamedTuple):
    """A change to a model.

    Attributes:
        names: The names of the tensor or module that changes.
        value: The value.
        kept: The tensor that gets the value in place; None to replace what has the names.
    """

    names: tuple[str, ...]
    value: Tensor | nn.Module
    kept: StoredTensor | None = None


def assignment(names: tuple[str, ...], old: Tensor, value: Tensor) -> Assignment:
    """Return the change that gives a tensor of the model a value, in place if torch lets it."""
    stored = stored_tensor(old)
    if stored.keeps_object(value):
        return Assignment(names, value, stored)
    return Assignment(names, stored.replaced_by(value))


def apply_assignments(model: nn.Module, assignments: Sequence[Assignment]) -> None:
    """Apply changes to a model in place.

    Layers come first, so that a layer's other tensors go into the layer that replaces it.
    """
    for names, value, kept in sorted(assignments, key=lambda each: not isinstance(each.value, nn.Module)):
        if kept is not None and isinstance(value, Tensor):
            kept.put(value)
            continue
        for name in names:
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, value)
