"""How a model tells that its parts are used: hooks of torch on the model and on the modules that bring weights."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from drivetrain_dispatch.errors import OffloadedError


class Listener(Protocol):
    """What is told; in this order, by every thread that uses the model.

    1. `begin` when the whole model is called. 2. `enter` and `leave` around each part, which may be one inside
    another, and out of order. 3. `end`, also when the forward failed. A part may be called with no forward around it.
    """

    def begin(self) -> None:
        """A forward of the whole model begins."""
        ...

    def enter(self, index: int) -> None:
        """A part is called."""
        ...

    def leave(self, index: int) -> None:
        """It has returned, or failed; also called if `enter` failed."""
        ...

    def end(self, *, whole: bool) -> None:
        """The forward is over; `whole` if it did not fail. Also called if `begin` failed."""
        ...


class _Hook:
    """A hook of a model that cannot be copied or pickled with it.

    Attributes:
        tell: What it calls.
    """

    def __init__(self, tell: Callable[..., None], index: int = 0) -> None:
        self.tell = tell
        self._index = index

    def __reduce__(self) -> NoReturn:
        raise OffloadedError(
            "a dispatched model cannot be copied or pickled as a whole: save its state_dict(), or call "
            "remove_hooks(model) first"
        )


class _Begin(_Hook):
    """The first one that is called. Others that a compiler meets are hidden from it: it would trace what they do."""

    def __init__(self, tell: Callable[..., None], others: Sequence[_Hook]) -> None:
        super().__init__(tell)
        self._others = others
        self._hidden = False

    def __call__(self, _module: nn.Module, _args: Any) -> None:
        # Where nothing was compiled yet, to ask torch for it would import the compiler: seconds.
        if not self._hidden and "torch._dynamo" in sys.modules:
            self._hidden = True
            for hook in self._others:
                hook.tell = torch.compiler.disable(hook.tell)
        self.tell()


class _End(_Hook):
    def __call__(self, _module: nn.Module, _args: Any, output: object) -> None:
        # After a failure torch calls without an output.
        self.tell(whole=output is not None)


class _Enter(_Hook):
    def __call__(self, _module: nn.Module, _args: Any) -> None:
        self.tell(self._index)


class _Leave(_Hook):
    def __call__(self, _module: nn.Module, _args: Any, _output: object) -> None:
        self.tell(self._index)


def listen(model: nn.Module, parts: Sequence[nn.Module], listener: Listener) -> list[RemovableHandle]:
    """Tell a listener of every use of a model and its parts, until the handles are removed.

    Hooks that the model has already are called outside: they see weights as they are stored.
    """
    enter = [_Enter(listener.enter, index) for index in range(len(parts))]
    leave = [_Leave(listener.leave, index) for index in range(len(parts))]
    handles: list[RemovableHandle] = []
    for part, before, after in zip(parts, enter, leave, strict=True):
        handles.append(part.register_forward_pre_hook(before))
        handles.append(part.register_forward_hook(after, prepend=True, always_call=True))
    begin, end = _Begin(listener.begin, [*enter, *leave]), _End(listener.end)
    handles.append(model.register_forward_pre_hook(begin, prepend=True))
    handles.append(model.register_forward_hook(end, always_call=True))
    return handles
