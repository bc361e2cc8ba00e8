"""Build models without memory, or directly on a device, by torch's registration hooks.

These hooks are global to all threads, so a hook acts only in the thread that made it. Other tensors of a constructor
keep their data, so that `torch.linspace(0, 1, depth)[i].item()` works.
"""

import copy
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from threading import get_ident
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from drivetrain_dispatch.compat import Args, Kwargs, Types
from drivetrain_dispatch.model.model_layout import ModelLayout

AnyObject = TypeVar("AnyObject")
# The mover of the innermost open block of a thread, the only one that acts.
_INNERMOST: "ContextVar[_Mover | None]" = ContextVar("drivetrain_dispatch_innermost", default=None)


@contextmanager
def init_empty_weights(*, include_buffers: bool = False) -> Generator[None]:
    """Build models in the block with parameters on the meta device: shapes and dtypes without memory.

    Such a model cannot compute; load weights into it, for example with `load_state_dict(..., assign=True)`.
    Initialisers do nothing on the meta device, so building is fast too.

    Args:
        include_buffers: Whether buffers go to the meta device too. By default they keep their data: constructors
            compute many buffers (masks, rotary frequencies) that checkpoints do not contain.

    Example:
        >>> with init_empty_weights():
        ...     model = torch.nn.Linear(1000, 1000)
        >>> model.weight.is_meta
        True
    """
    with init_on_device("meta", include_buffers=include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device | str | int, *, include_buffers: bool = False) -> Generator[None]:
    """Build models in the block with parameters on `device` from the moment they are registered.

    Only one parameter at a time takes memory elsewhere, so a model larger than the host's memory can be built on an
    accelerator. Tied parameters stay tied. Other threads are not affected. Blocks may be nested; the innermost one
    applies.

    Args:
        device: The device of the parameters.
        include_buffers: Whether buffers go to the device too.
    """
    mover = _Mover(torch.device(device))
    # torch takes the tensor that a hook returns, though its annotation says None.
    move = cast("Callable[..., None]", mover.move)
    with ExitStack() as hooks:
        hooks.callback(register_module_parameter_registration_hook(move).remove)
        if include_buffers:
            hooks.callback(register_module_buffer_registration_hook(move).remove)
        hooks.callback(_INNERMOST.reset, _INNERMOST.set(mover))
        yield


class _Mover:
    """A mover of tensors to a device; a tied tensor moves once, so that its names stay tied."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread = get_ident()
        self._moved = WeakIdKeyDictionary()

    def move(self, _module: nn.Module, _name: str, tensor: Tensor | None) -> Tensor | None:
        """Return the tensor for a module to register, moved if this block is the innermost one of the thread."""
        if tensor is None or get_ident() != self._thread or _INNERMOST.get() is not self:
            return tensor
        if tensor.device == self._device or is_lazy(tensor):  # a lazy module's tensor has no shape yet
            return tensor
        if tensor not in self._moved:
            moved = tensor.to(self._device)
            if isinstance(tensor, nn.Parameter):
                # A subclass of nn.Parameter has the same constructor; its own attributes, such as scales, are copied.
                moved = type(tensor)(moved.detach(), requires_grad=tensor.requires_grad)
                vars(moved).update(vars(tensor))
            self._moved[tensor] = moved
        return self._moved[tensor]


def meta_copy(layout: ModelLayout, inputs: AnyObject) -> tuple[nn.Module, AnyObject]:
    """Return a deep copy of a model and of its inputs, without data on the meta device; tied tensors stay tied."""
    memo: dict[int, Any] = {}
    for tensor in layout.tensors.values():
        empty = _empty(tensor)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo.setdefault(id(tensor), nn.Parameter(empty, requires_grad=False) if is_parameter else empty)
    with _Emptying():
        return copy.deepcopy((layout.model, inputs), memo)


class _Emptying(TorchFunctionMode):
    """A mode under which `copy.deepcopy` copies tensors to the meta device."""

    def __torch_function__(self, func: Any, types: Types, args: Args = (), kwargs: Kwargs = None) -> object:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            empty = memo[id(tensor)] = _empty(tensor)
            return empty
        if func is Tensor.clone:  # nn.Parameter.__deepcopy__ calls it
            return _empty(args[0])
        return func(*args, **(kwargs or {}))


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta", requires_grad=False)
