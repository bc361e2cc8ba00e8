"""Refuse to move or convert a model with offloaded weights, before any of its tensors has changed."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain_dispatch.errors import OffloadedError
from drivetrain_dispatch.model.sizes import enclosing_modules, named_tensors
from drivetrain_dispatch.model.tensor_subclass import is_packed
from drivetrain_dispatch.offload.forward_hooks import Around
from drivetrain_dispatch.offload.parameter import CANNOT_BE_CHANGED, is_away, kind_in_use

_APPLY = "_apply"  # the method of each module that to, cuda, half, ... call


class Immovable(Around):
    """A replacement for `Module._apply` that refuses to move or convert offloaded weights, until it is removed.

    Calls that leave every weight unchanged go through, such as `model.cpu()` where the host computes.

    Args:
        module: The module to keep in place.
        has_packed: Whether any of its offloaded weights is packed.
    """

    def __init__(self, module: nn.Module, *, has_packed: bool) -> None:
        super().__init__(module, _APPLY)
        self._has_packed = has_packed

    def __call__(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        """Apply a function to the tensors of the module.

        Raises:
            OffloadedError: The function would change an offloaded tensor. Nothing is changed.
        """
        module = self.module
        tensors = [] if module is None else [*module.parameters(), *module.buffers()]
        if self._has_packed or any(is_away(tensor) and _changes(fn, tensor) for tensor in tensors):
            raise OffloadedError(CANNOT_BE_CHANGED)
        return self.call_inner((fn, *args), kwargs)


def keep_in_place(model: nn.Module, coming: Collection[str]) -> list[Immovable]:
    """Refuse to move the modules that hold offloaded tensors, until the returned objects are removed.

    Args:
        model: The model to keep in place.
        coming: The names of the offloaded tensors.
    """
    tensors = dict(named_tensors(model))
    ids = {id(tensors[name]): is_packed(tensors[name]) for name in coming}
    modules = dict(model.named_modules(remove_duplicate=False))
    holds: dict[str, bool] = {}
    for name, module in modules.items():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        found = [ids[id(tensor)] for tensor in own if id(tensor) in ids]
        for outer in [*enclosing_modules(name), name] if found else ():
            holds[outer] = holds.get(outer, False) or any(found)
    each = {id(modules[name]): (modules[name], has_packed) for name, has_packed in holds.items()}
    return [Immovable(module, has_packed=has_packed) for module, has_packed in each.values()]


def _changes(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> bool:
    """Return whether a function changes a tensor, tried on a few elements of its dtype and device."""
    kind = kind_in_use(tensor)
    if kind is None:
        return True  # stored on one device, computed by another
    dtype, device = kind
    with torch.no_grad():
        probe = torch.empty([min(size, 2) for size in tensor.shape], dtype=dtype, device=device)
        return fn(probe) is not probe
