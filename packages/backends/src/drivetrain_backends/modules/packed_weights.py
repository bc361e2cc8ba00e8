"""Frozen weights that bitsandbytes packed, and their entries in a model's state."""

from collections.abc import Iterable, Iterator

from torch import nn

from drivetrain_backends.compat import COMPILED_MODULE

_LIBRARY = "bitsandbytes."


def is_packed(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a weight in a class of bitsandbytes, and frozen."""
    return type(parameter).__module__.startswith(_LIBRARY) and not parameter.requires_grad


def packed_entries(model: nn.Module, names: Iterable[str]) -> frozenset[str]:
    """Return which names of a model's state belong to packed weights and are no parameter or buffer.

    They are the scales (`weight.absmax`, `SCB`), which bitsandbytes writes and cannot load back into a layer. FSDP
    keeps the bytes of a packed weight alone, and has no such names.

    Args:
        model: The model, as torch.compile returned it or plain.
        names: Plain names of its state.
    """
    tensors = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    known = {_plain(name) for name, _ in tensors}
    prefixes = tuple(_prefixes(model))
    return frozenset(name for name in names if name not in known and name.startswith(prefixes))


def _prefixes(model: nn.Module) -> Iterator[str]:
    """Yield the names of the modules that hold a packed weight, each with a dot at the end."""
    for name, module in model.named_modules():
        if any(map(is_packed, module.parameters(recurse=False))):
            yield f"{_plain(name)}." if name else ""


def _plain(name: str) -> str:
    return name.replace(f"{COMPILED_MODULE}.", "")
