"""How a model tells that its parts are used: a call around the forward of the model and of each part.

Around, not torch's hooks: those cost a module more than the rest of what is done here, cannot undo what they began
when a hook before them fails, and know of no method but the forward. Autoencoders are used by `encode` and `decode`.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import WRAPPER_ASSIGNMENTS
from types import MethodType
from typing import Any, NoReturn, Protocol, cast
from weakref import ref

import torch
from torch import nn

from drivetrain_dispatch.errors import OffloadedError

FORWARD = "forward"
# What others compute with a model by, beside its forward, if it has them.
_METHODS = ("encode", "decode")

_CANNOT_BE_RECORDED = (
    "weights of this model come and go, which torch.export and torch.jit.trace cannot record: call "
    "remove_hooks(model) first, and dispatch the model again afterwards; torch.compile takes it as it is"
)


class Listener(Protocol):
    """What is told; in this order, by every thread that uses the model.

    1. `begin` when the whole model is called, or a method of it that computes, maybe within another. 2. `enter` and
    `leave` around each part, which may be one inside another, and out of order. 3. `end`. What began well is ended,
    also when the forward fails. A part may be called with no forward around it.
    """

    def begin(self, way: str) -> None:
        """The whole model is used: by its forward, or the method of that name."""
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


def _as_it_is(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
    return output


class NotCopied:
    """What stands in a model that is dispatched, and cannot be copied or pickled with it."""

    def __reduce__(self) -> NoReturn:
        raise OffloadedError(
            "a dispatched model cannot be copied or pickled as a whole: save its state_dict(), or call "
            "remove_hooks(model), or remove() of its OffloadHook, first"
        )


class Around(NotCopied):
    """Stands in for the forward of a module, or for another method.

    The module holds it, so it must not hold the module: a model that nobody refers to any more is freed at once.

    Args:
        module: The module.
        name: The method's.
    """

    def __init__(self, module: nn.Module, name: str = FORWARD) -> None:
        method: Callable[..., Any] = getattr(module, name)
        self.name = name
        self._module = ref(module)
        self._was_own = name in module.__dict__
        self._binds = not self._was_own and isinstance(method, MethodType) and method.__self__ is module
        self._function = cast("MethodType", method).__func__ if self._binds else method
        for attribute in WRAPPER_ASSIGNMENTS:
            if hasattr(method, attribute):
                setattr(self, attribute, getattr(method, attribute))
        setattr(module, name, self)

    @property
    def module(self) -> nn.Module | None:
        """The module; None once it is gone."""
        return self._module()

    @property
    def inner(self) -> Callable[..., Any]:
        """What this stands in for.

        Raises:
            OffloadedError: The module is gone.
        """
        return MethodType(self._function, self._alive()) if self._binds else self._function

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Whoever asks for the signature gets the module's."""
        return self.inner

    @property
    def __code__(self) -> Any:
        """That of the method, from which torch.export takes the names of its arguments."""
        return cast("Any", self.inner).__code__

    @property
    def __globals__(self) -> Any:
        """What torch.jit.script asks for first; torch.fx can do without.

        Raises:
            AttributeError: Always.
        """
        raise AttributeError(
            "torch.jit.script cannot compile a dispatched model: call remove_hooks(model), or remove() of its "
            "OffloadHook, first; torch.compile takes it as it is"
        )

    def call_inner(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call what this stands in for.

        Raises:
            OffloadedError: The module is gone.
        """
        if self._binds:
            return self._function(self._alive(), *args, **kwargs)
        return self._function(*args, **kwargs)

    def remove(self) -> None:
        """Give the module back its own."""
        if (module := self._module()) is None:
            return
        if self._was_own:
            setattr(module, self.name, self._function)
        else:
            delattr(module, self.name)

    def _alive(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise OffloadedError(
                f"the {self.name} of a dispatched model, or of a part of it, was called after the model was deleted: "
                "hold the model itself as long as you call its methods"
            )
        return module


class AroundMethod(Around):
    """Has a method be called as torch's hooks have a forward be called.

    Args:
        module: The module.
        name: The method's.
        before: Gives what the method is called with.
        after: Gives what it returns; called with None if it failed.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        before: Callable[
            [nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]
        ],
        after: Callable[[nn.Module, tuple[Any, ...], Any], Any] = _as_it_is,
    ) -> None:
        super().__init__(module, name)
        self._before: Callable[..., Any] | None = before
        self._after = after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        if self._before is None:
            return self.call_inner(args, kwargs)
        module = self._alive()
        args, kwargs = self._before(module, args, kwargs)
        try:
            output = self.call_inner(args, kwargs)
        except BaseException:
            self._after(module, args, None)
            raise
        return self._after(module, args, output)

    def remove(self) -> None:
        """Give the module back its own; where somebody stands around this, do nothing from now on."""
        if getattr(self.module, self.name, None) is self:
            super().remove()
        else:
            self._before = None


class _AroundPart(Around):
    """Around the forward of a part."""

    def __init__(self, module: nn.Module, listener: Listener, index: int) -> None:
        super().__init__(module)
        self.enter: Callable[[int], None] = listener.enter
        self.leave: Callable[[int], None] = listener.leave
        self._index = index

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _check_not_recorded()
        self.enter(self._index)
        try:
            return self.call_inner(args, kwargs)
        finally:
            self.leave(self._index)

    def hide(self) -> None:
        """Hide what is told from torch's compiler, which would trace it."""
        self.enter = cast("Callable[[int], None]", torch.compiler.disable(self.enter))
        self.leave = cast("Callable[[int], None]", torch.compiler.disable(self.leave))


class _AroundModel(Around):
    """Around the forward of the whole model, or another method of it."""

    def __init__(
        self, module: nn.Module, name: str, listener: Listener, parts: Sequence[_AroundPart]
    ) -> None:
        super().__init__(module, name)
        self._listener = listener
        self._parts = parts
        self._hidden = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._parts:
            _check_not_recorded()
        elif torch.compiler.is_exporting():
            return self.call_inner(args, kwargs)  # what is used in place, a program holds as it is
        # Where nothing was compiled yet, to ask torch for it would import the compiler: seconds.
        if not self._hidden and "torch._dynamo" in sys.modules:
            self._hidden = True
            for part in self._parts:
                part.hide()
        whole = False
        self._listener.begin(self.name)
        try:
            output = self.call_inner(args, kwargs)
            whole = True
        finally:
            self._listener.end(whole=whole)
        return output


def _check_not_recorded() -> None:
    """Check that no program is made of this call: it would hold what is stored, and bring nothing.

    Raises:
        OffloadedError: One is.
    """
    if torch.compiler.is_exporting() or torch.jit.is_tracing():
        raise OffloadedError(_CANNOT_BE_RECORDED)


def methods_of(module: nn.Module) -> list[str]:
    """The methods of a module beside its forward that compute with it. Pure."""
    return [
        name
        for name in _METHODS
        if isinstance(vars(module).get(name), Around | MethodType)
        or inspect.isfunction(inspect.getattr_static(type(module), name, None))  # no property is asked
    ]


def listen(model: nn.Module, parts: Sequence[nn.Module], listener: Listener) -> list[Around]:
    """Tell a listener of every use of a model and its parts, until what is returned is removed, the last one first.

    Args:
        model: The model.
        parts: Modules of it.
        listener: Who is told of a part by its index.
    """
    methods = methods_of(model)
    around = [_AroundPart(part, listener, index) for index, part in enumerate(parts)]
    return [*around, *(_AroundModel(model, name, listener, around) for name in (FORWARD, *methods))]


def check_removable(arounds: Sequence[Around]) -> None:
    """Check that all can be removed, the last one first.

    Raises:
        OffloadedError: Somebody has replaced the forward of a module since, or another method.
    """
    met: dict[tuple[nn.Module, str], object] = {}
    for around in reversed(arounds):
        module, name = around.module, around.name
        if module is None:
            continue
        if met.get((module, name), getattr(module, name)) is not around:
            raise OffloadedError(
                f"the {name} of {type(module).__name__} was replaced after the model was dispatched: undo that "
                "before the hooks are removed"
            )
        met[module, name] = around.inner
