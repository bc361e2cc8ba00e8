"""Models built without memory, or straight on a device.

Weights are moved the moment a module registers them, through torch's registration hooks, which serve all threads: a
hook acts only in the thread that made it. Everything else that a constructor computes stays real, so that
`torch.linspace(0, 1, depth)[i].item()` works in it.
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from threading import get_ident
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

AnyTensor = TypeVar("AnyTensor", bound=Tensor)

# Of the blocks that are open in a thread, the one that decides.
_INNERMOST: "ContextVar[_Mover | None]" = ContextVar("drivetrain_dispatch_innermost", default=None)


@contextmanager
def init_empty_weights(*, include_buffers: bool = False) -> Generator[None]:
    """Build models whose parameters are on the meta device: shapes and dtypes without memory.

    Such a model cannot compute; load weights into it, with `load_state_dict(..., assign=True)` for instance.
    Initialisers cost nothing on it, so that building takes little time too.

    Args:
        include_buffers: Whether buffers lose their data too. By default they keep it: constructors compute many
            of them (masks, rotary frequencies), and checkpoints do not hold those.

    Example:
        >>> with init_empty_weights():
        ...     model = torch.nn.Linear(100_000, 100_000)
        >>> model.weight.is_meta
        True
    """
    with init_on_device("meta", include_buffers=include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device | str | int, *, include_buffers: bool = False) -> Generator[None]:
    """Build models whose parameters are on `device` from the moment they are registered.

    One parameter at a time takes memory elsewhere, so a model larger than the host's memory can be built on an
    accelerator. Tied parameters stay tied. Other threads are not affected. May be nested; the inner one wins.

    Args:
        device: Where parameters go.
        include_buffers: Whether buffers go there too.
    """
    place = torch.device(device)
    mover = _Mover(place)
    with ExitStack() as hooks:
        hooks.callback(register_module_parameter_registration_hook(mover.hook(mover.parameter)).remove)
        if include_buffers:
            hooks.callback(register_module_buffer_registration_hook(mover.hook(mover.buffer)).remove)
        hooks.callback(_INNERMOST.reset, _INNERMOST.set(mover))
        yield


class _Mover:
    """Moves tensors to a device; one that comes again goes where it went before, so that ties hold."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread = get_ident()
        self._moved = WeakIdKeyDictionary()

    def hook(self, move: Callable[[AnyTensor], AnyTensor]) -> Callable[..., None]:
        """A registration hook that acts in the thread that made it, while no inner block is open there."""

        def registered(_: nn.Module, __: str, tensor: AnyTensor | None) -> AnyTensor | None:
            if tensor is None or get_ident() != self._thread or _INNERMOST.get() is not self:
                return tensor
            return move(tensor)

        # torch takes the tensor that a hook returns, though its annotation says None.
        return cast("Callable[..., None]", registered)

    def parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        if self._stays(parameter):
            return parameter
        if parameter not in self._moved:
            # A subclass takes what its base takes; its own attributes (a quantizer's scales, say) move along.
            moved = type(parameter)(
                parameter.detach().to(self._device), requires_grad=parameter.requires_grad
            )
            vars(moved).update(vars(parameter))
            self._moved[parameter] = moved
        return self._moved[parameter]

    def buffer(self, buffer: Tensor) -> Tensor:
        if self._stays(buffer):
            return buffer
        if buffer not in self._moved:
            self._moved[buffer] = buffer.to(self._device)
        return self._moved[buffer]

    def _stays(self, tensor: Tensor) -> bool:
        """Whether it is there already, or a lazy module has yet to give it a shape."""
        return tensor.device == self._device or is_lazy(tensor)
