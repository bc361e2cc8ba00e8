"""How many bytes each part of a model takes, also before it has any memory."""

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from drivetrain_dispatch.model.tensor_subclass import is_packed, parts_of, size_in_bytes


def compute_module_sizes(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    special_dtypes: Mapping[str, torch.dtype] | None = None,
    special_sizes: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """The bytes of the parameters and buffers in a model, each of its modules, and each single tensor.

    A tensor that several names share counts once in every module that holds all of them; under its own names, each
    is given its full size. Works on the meta device.

    Args:
        model: The model.
        dtype: What floating-point and complex tensors will be converted to; None takes them as they are. Integer
            and boolean ones keep their dtype, as `Module.to(dtype)` has it.
        special_dtypes: Dtypes of single tensors by name, which win over `dtype`.
        special_sizes: Bytes of single tensors by name, as `quantized_sizes` gives them, which win over dtypes.

    Returns:
        Bytes by name; the model itself is `""`.

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
    """How many bytes each tensor of a model will take.

    Args:
        names: Of all of them.
        dtype: What floating-point and complex ones will be converted to.
        special_dtypes: Dtypes of single ones.
        special_sizes: Bytes of single ones.

    Raises:
        ValueError: A special one is not among the names.
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
        """The bytes of one."""
        if name in self._sizes:
            return self._sizes[name]
        if is_packed(tensor):
            return size_in_bytes(tensor)
        return tensor.numel() * dtype_after(tensor, self._dtype, self._dtypes.get(name)).itemsize


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer under every name it has."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def enclosing_modules(name: str) -> Iterator[str]:
    """The names of the modules around a tensor or module, from the whole model, `""`, inwards."""
    yield ""
    for position, character in enumerate(name):
        if character == ".":
            yield name[:position]


def identity(tensor: Tensor) -> object:
    """Equal for tensors that are the same elements of the same memory, or, without memory, the same object."""
    if tensor.is_meta or tensor.numel() == 0:
        return id(tensor)
    if is_packed(tensor):
        return tuple(map(identity, parts_of(tensor)))
    return (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def dtype_after(tensor: Tensor, dtype: torch.dtype | None, special: torch.dtype | None) -> torch.dtype:
    """What a tensor will be, where floating-point and complex ones are converted to `dtype` unless it is special."""
    if special is not None:
        return special
    converts = tensor.is_floating_point() or tensor.is_complex()
    return dtype if dtype is not None and converts else tensor.dtype


def listed(names: str | Collection[str]) -> Collection[str]:
    """Names, of which a single one may be given as it is."""
    return (names,) if isinstance(names, str) else names
