"""How a model tells that its parts are used: a call around the forward of the model and of each part.

Around, not torch's hooks: those cost a module more than the rest of what is done here, and cannot undo what they
began when a hook before them fails.
"""

import sys
from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any, NoReturn, Protocol, cast

import torch
from torch import nn

from drivetrain_dispatch.errors import OffloadedError


class Listener(Protocol):
    """What is told; in this order, by every thread that uses the model.

    1. `begin` when the whole model is called. 2. `enter` and `leave` around each part, which may be one inside
    another, and out of order. 3. `end`. What began well is ended, also when the forward fails. A part may be called
    with no forward around it.
    """

    def begin(self) -> None:
        """A forward of the whole model begins."""
        ...

    def enter(self, index: int) -> None:
        """A part is called."""
        ...

    def leave(self, index: int) -> None:
        """It has returned, or failed."""
        ...

    def end(self, *, whole: bool) -> None:
        """The forward is over; `whole` if it did not fail."""
        ...


class _Around:
    """Stands in for the forward of a module; cannot be copied or pickled with it.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.inner: Callable[..., Any] = module.forward
        self.module = module
        self._was_own = "forward" in module.__dict__
        # Whoever asks for the signature gets the module's.
        update_wrapper(cast("Callable[..., Any]", self), self.inner, updated=())
        module.forward = cast("Callable[..., Any]", self)

    def __reduce__(self) -> NoReturn:
        raise OffloadedError(
            "a dispatched model cannot be copied or pickled as a whole: save its state_dict(), or call "
            "remove_hooks(model) first"
        )

    def remove(self) -> None:
        """Give the module back its forward."""
        if self._was_own:
            self.module.forward = self.inner
        else:
            del self.module.forward


class _AroundPart(_Around):
    """Around the forward of a part."""

    def __init__(self, module: nn.Module, listener: Listener, index: int) -> None:
        super().__init__(module)
        self.enter: Callable[[int], None] = listener.enter
        self.leave: Callable[[int], None] = listener.leave
        self._index = index

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.enter(self._index)
        try:
            return self.inner(*args, **kwargs)
        finally:
            self.leave(self._index)

    def hide(self) -> None:
        """Hide what is told from torch's compiler, which would trace it."""
        self.enter = cast("Callable[[int], None]", torch.compiler.disable(self.enter))
        self.leave = cast("Callable[[int], None]", torch.compiler.disable(self.leave))


class _AroundModel(_Around):
    """Around the forward of the whole model."""

    def __init__(self, module: nn.Module, listener: Listener, parts: Sequence[_AroundPart]) -> None:
        super().__init__(module)
        self._listener = listener
        self._parts = parts
        self._hidden = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Where nothing was compiled yet, to ask torch for it would import the compiler: seconds.
        if not self._hidden and "torch._dynamo" in sys.modules:
            self._hidden = True
            for part in self._parts:
                part.hide()
        whole = False
        self._listener.begin()
        try:
            output = self.inner(*args, **kwargs)
            whole = True
        finally:
            self._listener.end(whole=whole)
        return output


class Listening:
    """Tells a listener of every use of a model and its parts, until it is removed.

    Args:
        model: The model.
        parts: Modules of it.
        listener: Who is told of a part by its index.

    Attributes:
        around: What stands around forwards, each after those that it stands around.
    """

    def __init__(self, model: nn.Module, parts: Sequence[nn.Module], listener: Listener) -> None:
        around = [_AroundPart(part, listener, index) for index, part in enumerate(parts)]
        self.around: list[_Around] = [*around, _AroundModel(model, listener, around)]

    def remove(self) -> None:
        """Tell no more."""
        for around in reversed(self.around):
            around.remove()


def check_removable(listening: Sequence[Listening]) -> None:
    """Check that all can be removed, the last one first.

    Raises:
        OffloadedError: Somebody has replaced the forward of a module since.
    """
    forwards: dict[nn.Module, object] = {}
    for one in reversed(listening):
        for around in reversed(one.around):
            module = around.module
            if forwards.get(module, module.forward) is not around:
                raise OffloadedError(
                    f"the forward of {type(module).__name__} was replaced after the model was dispatched: undo that "
                    "before remove_hooks(model)"
                )
            forwards[module] = around.inner
