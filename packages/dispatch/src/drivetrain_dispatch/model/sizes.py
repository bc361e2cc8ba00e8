"""Compute the bytes of each part of a model, even on the meta device."""

from collections.abc import Collection, Container, Iterator, Mapping

import torch
from torch import Tensor, nn

from drivetrain_dispatch.model.model_layout import ModelLayout
from drivetrain_dispatch.model.quantized_tensor import is_quantized, parts_of
from drivetrain_weights.tied_parameters import memory_key


def compute_module_sizes(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    special_dtypes: Mapping[str, torch.dtype] | None = None,
    special_sizes: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Return the bytes of the parameters and buffers of a model, of each of its modules, and of each tensor.

    A tied tensor counts once in every module that contains several of its names; each of its own names has its full
    size. Works on the meta device.

    The sizes are those after a conversion of floating-point and complex tensors to `dtype`, as by `Module.to(dtype)`.
    `special_dtypes` and then `special_sizes`, as `quantized_sizes` returns them, take precedence for single tensors.

    Returns:
        The bytes of each name; `""` is the model itself.

    Raises:
        ValueError: `special_dtypes` or `special_sizes` names a tensor that the model does not have.

    Example:
        >>> compute_module_sizes(torch.nn.Linear(4, 2, device="meta"))
        {'': 40, 'weight': 32, 'bias': 8}
    """
    layout = ModelLayout.of(model, dtype=dtype, special_dtypes=special_dtypes, special_sizes=special_sizes)
    sizes = dict.fromkeys(layout.modules, 0) | layout.sizes
    counted: set[tuple[str, object]] = set()
    for name, tensor in layout.tensors.items():
        key = identity(tensor)
        for module in enclosing_modules(name):
            if (module, key) not in counted:
                counted.add((module, key))
                sizes[module] += layout.sizes[name]
    return sizes


def enclosing_modules(name: str) -> Iterator[str]:
    """Yield the names of the modules around a tensor or module, from the model itself, `""`, inwards."""
    yield ""
    for position, character in enumerate(name):
        if character == ".":
            yield name[:position]


def nearest_entry(name: str, entries: Container[str]) -> str | None:
    """Return the longest entry that is a tensor's name or the name of a module around it; None if there is none."""
    if name in entries:
        return name
    return next((outer for outer in reversed(list(enclosing_modules(name))) if outer in entries), None)


def identity(tensor: Tensor) -> object:
    """Return a key that tensors over the same elements of memory share; without memory, the object's identity."""
    has_memory = not tensor.is_meta and tensor.numel() > 0
    if has_memory and is_quantized(tensor):
        return tuple(map(identity, parts_of(tensor)))
    return memory_key(tensor)


def listed(names: str | Collection[str]) -> Collection[str]:
    """Return names as a collection; a single string becomes a tuple of one."""
    return (names,) if isinstance(names, str) else names
