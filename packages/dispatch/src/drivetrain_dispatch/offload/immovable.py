"""Refuse to move or convert a model with offloaded weights, before any of its tensors has changed."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain_dispatch.compat import APPLY
from drivetrain_dispatch.errors import OffloadedError
from drivetrain_dispatch.model.model_layout import ModelLayout
from drivetrain_dispatch.model.sizes import enclosing_modules
from drivetrain_dispatch.offload.forward_hooks import MethodWrapper
from drivetrain_dispatch.offload.parameter import CANNOT_BE_CHANGED, is_offloaded, kind_in_use


def keep_in_place(layout: ModelLayout, offloaded: Collection[str]) -> list[MethodWrapper]:
    """Refuse to move or convert the modules that hold offloaded tensors, until the returned wrappers are removed.

    Calls that leave every weight unchanged go through, such as `model.cpu()` where the host computes; but none where
    a quantized weight is offloaded.
    """
    quantized = {id(layout.tensors[name]): name in layout.quantized for name in offloaded}
    holds_quantized: dict[nn.Module, bool] = {}  # of each module that holds an offloaded tensor
    for name, module in layout.modules.items():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        found = [quantized[id(tensor)] for tensor in own if id(tensor) in quantized]
        for outer in [*enclosing_modules(name), name] if found else ():
            around = layout.modules[outer]
            holds_quantized[around] = holds_quantized.get(around, False) or any(found)
    return [
        MethodWrapper(module, APPLY, _refuse if quantized_too else _refuse_changes)
        for module, quantized_too in holds_quantized.items()
    ]


def _refuse(_apply: MethodWrapper, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Refuse any function that may change tensors."""
    raise OffloadedError(CANNOT_BE_CHANGED)


def _refuse_changes(apply: MethodWrapper, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a function to the tensors of a module, unless it would change an offloaded one."""
    module = apply.alive_module()
    function: Callable[[Tensor], Tensor] = kwargs["fn"] if "fn" in kwargs else args[0]
    tensors = [*module.parameters(), *module.buffers()]
    if any(is_offloaded(tensor) and _changes(function, tensor) for tensor in tensors):
        raise OffloadedError(CANNOT_BE_CHANGED)
    return apply.call_original(args, kwargs)


def _changes(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> bool:
    """Return whether a function changes a tensor, tried on a few elements of its dtype and device."""
    kind = kind_in_use(tensor)
    if kind is None:
        return True  # stored on one device, computed by another
    dtype, device = kind
    with torch.no_grad():
        probe = torch.empty([min(size, 2) for size in tensor.shape], dtype=dtype, device=device)
        return fn(probe) is not probe
