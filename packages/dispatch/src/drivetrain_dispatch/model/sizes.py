"""Compute the bytes of each part of a model, even on the meta device."""

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from drivetrain_dispatch.model.tensor_subclass import is_packed, parts_of, size_in_bytes
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

    Args:
        model: The model to measure.
        dtype: The dtype that floating-point and complex tensors will be converted to; None for no conversion. Integer
            and boolean tensors keep their dtype, as in `Module.to(dtype)`.
        special_dtypes: Dtypes of single tensors by name, which take precedence over `dtype`.
        special_sizes: Bytes of single tensors by name, as `quantized_sizes` returns them, which take precedence over
            dtypes.

    Returns:
        The bytes of each name; `""` is the model itself.

    Raises:
        ValueError: `special_dtypes` or `special_sizes` names a tensor that the model does not have.
    """
    tensors = list(named_tensors(model))
    size_of = Sizes([name for name, _ in tensors], dtype, special_dtypes, special_sizes)
    sizes = {name: 0 for name, _ in model.named_modules(remove_duplicate=False)}
    counted: set[tuple[str, object]] = set()
    for name, tensor in tensors:
        size = sizes[name] = size_of(name, tensor)
        for module in enclosing_modules(name):
            if (module, identity(tensor)) not in counted:
                counted.add((module, identity(tensor)))
                sizes[module] += size
    return sizes


class Sizes:
    """A function that returns the bytes that a tensor of a model will take.

    Args:
        names: The names of all tensors.
        dtype: The dtype that floating-point and complex tensors will be converted to; None for no conversion.
        special_dtypes: Dtypes of single tensors by name.
        special_sizes: Bytes of single tensors by name.

    Raises:
        ValueError: `special_dtypes` or `special_sizes` has a name that is not in `names`.
    """

    def __init__(
        self,
        names: Collection[str],
        dtype: torch.dtype | None,
        special_dtypes: Mapping[str, torch.dtype] | None,
        special_sizes: Mapping[str, int] | None,
    ) -> None:
        self._dtype, self._dtypes, self._sizes = dtype, special_dtypes or {}, special_sizes or {}
        for argument, special in (("special_dtypes", self._dtypes), ("special_sizes", self._sizes)):
            if special and (unknown := sorted(special.keys() - set(names))):
                raise ValueError(
                    f"{argument}={unknown}: the model has no such parameter or buffer; see named_parameters()"
                )

    def __call__(self, name: str, tensor: Tensor) -> int:
        """Return the bytes that a tensor will take."""
        if name in self._sizes:
            return self._sizes[name]
        if is_packed(tensor):
            return size_in_bytes(tensor)
        return tensor.numel() * dtype_after(tensor, self._dtype, self._dtypes.get(name)).itemsize


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer under every name that it has."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def enclosing_modules(name: str) -> Iterator[str]:
    """Yield the names of the modules around a tensor or module, from the model itself, `""`, inwards."""
    yield ""
    for position, character in enumerate(name):
        if character == ".":
            yield name[:position]


def identity(tensor: Tensor) -> object:
    """Return a key that tensors over the same elements of memory share; without memory, the object's identity."""
    has_memory = not tensor.is_meta and tensor.numel() > 0
    if has_memory and is_packed(tensor):
        return tuple(map(identity, parts_of(tensor)))
    return memory_key(tensor)


def dtype_after(tensor: Tensor, dtype: torch.dtype | None, special: torch.dtype | None) -> torch.dtype:
    """Return a tensor's dtype after conversion: `special`, otherwise `dtype` if it is floating-point or complex."""
    if special is not None:
        return special
    converts = tensor.is_floating_point() or tensor.is_complex()
    return dtype if dtype is not None and converts else tensor.dtype


def listed(names: str | Collection[str]) -> Collection[str]:
    """Return names as a collection; a single string becomes a tuple of one."""
    return (names,) if isinstance(names, str) else names
