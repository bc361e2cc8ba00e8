"""Frozen weights that bitsandbytes or torchao packed, and their entries in a model's state."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from drivetrain_backends.compat import COMPILED_MODULE
from drivetrain_weights.tensor_box import is_dtensor

_BITSANDBYTES, _TORCHAO = "bitsandbytes.", "torchao."
_NOT_PACKED = "torchao.float8."  # plain values, in a class that says how they are gathered


def is_packed(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is frozen and its class is one of bitsandbytes or torchao."""
    is_of_bitsandbytes = type(parameter).__module__.startswith(_BITSANDBYTES) and not parameter.requires_grad
    return is_of_bitsandbytes or is_wrapper(parameter)


def is_wrapper(parameter: Tensor) -> bool:
    """Return whether a parameter is frozen in a tensor class of torchao, which holds its codes and scales inside.

    torchao 0.18 gives these classes neither the views by which DDP and FSDP2 send a weight, nor plain values.
    """
    kind = type(parameter)
    return (
        not parameter.requires_grad
        and kind.__module__.startswith(_TORCHAO)
        and not kind.__module__.startswith(_NOT_PACKED)
        and hasattr(kind, "__tensor_unflatten__")
        and not is_dtensor(parameter)
    )


def parts_of(tensor: Any) -> list[Tensor]:
    """Return the plain tensors inside a wrapper, in a fixed order; for any other tensor, return the tensor alone."""
    if type(tensor) in (Tensor, nn.Parameter) or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in parts_of(getattr(tensor, name))]


def packed_entries(model: nn.Module, names: Iterable[str]) -> frozenset[str]:
    """Return the names in a model's state that belong to packed weights but are no parameter or buffer.

    They are the names of scales (`weight.absmax`, `SCB`): bitsandbytes writes scales, but cannot load them into a
    layer. FSDP keeps only the bytes of a packed weight, and has no such names.

    Args:
        model: The model, compiled by torch.compile or plain.
        names: The plain names in the model's state.
    """
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    known = {_plain(name) for name, _ in tensors}
    holders = [n for n, m in model.named_modules() if any(map(is_packed, m.parameters(recurse=False)))]
    prefixes = tuple(f"{_plain(name)}." if name else "" for name in holders)
    return frozenset(name for name in names if name not in known and name.startswith(prefixes))


def _plain(name: str) -> str:
    return name.replace(f"{COMPILED_MODULE}.", "")
