"""Call a listener around the forward of a model and of each of its parts.

Forwards are replaced rather than hooked: torch's hooks cost a module more than all the rest of this package, cannot
undo their work when an earlier hook fails, and cover no method but the forward. Autoencoders are used by `encode` and
`decode`.
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
# The methods beside the forward by which callers compute with a model, if it has them.
_METHODS = ("encode", "decode")

_CANNOT_BE_RECORDED = (
    "weights of this model come and go, which torch.export and torch.jit.trace cannot record: call "
    "remove_hooks(model) first, and dispatch the model again afterwards; torch.compile takes it as it is"
)


class Listener(Protocol):
    """The callbacks for uses of a model; every thread that uses it calls them in this order.

    1. `begin` when the whole model or another method that computes is called, maybe nested. 2. `enter` and `leave`
    around each part; parts may be nested and in any order. 3. `end`. After a `begin` or `enter` that succeeded, its
    counterpart is called even if the forward fails. A part may be called outside any forward.
    """

    def begin(self, way: str) -> None:
        """Begin a call of the whole model, by its forward or the method of that name."""
        ...

    def enter(self, index: int) -> None:
        """Begin a call of a part."""
        ...

    def leave(self, index: int) -> None:
        """End a call of a part, which returned or failed."""
        ...

    def end(self, *, whole: bool) -> None:
        """End a call of the whole model; `whole` is True if it did not fail."""
        ...


def _as_it_is(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
    return output


class NotCopied:
    """A base class of objects in a dispatched model that cannot be copied or pickled with it."""

    def __reduce__(self) -> NoReturn:
        raise OffloadedError(
            "a dispatched model cannot be copied or pickled as a whole: save its state_dict(), or call "
            "remove_hooks(model), or remove() of its OffloadHook, first"
        )


class Around(NotCopied):
    """A replacement for the forward of a module, or for another method.

    The module holds it, so it must not hold the module: a model without other references is freed at once.

    Args:
        module: The module whose method is replaced.
        name: The name of the method.
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
        """The module; None once it is freed."""
        return self._module()

    @property
    def inner(self) -> Callable[..., Any]:
        """The method that this replaces.

        Raises:
            OffloadedError: The module was freed.
        """
        return MethodType(self._function, self._alive()) if self._binds else self._function

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The replaced method, whose signature `inspect.signature` returns."""
        return self.inner

    @property
    def __code__(self) -> Any:
        """The code of the replaced method, from which torch.export takes the names of its arguments."""
        return cast("Any", self.inner).__code__

    @property
    def __globals__(self) -> Any:
        """An attribute that only torch.jit.script needs, which is refused; torch.fx does without it.

        Raises:
            AttributeError: On every access; the message says what to do first.
        """
        raise AttributeError(
            "torch.jit.script cannot compile a dispatched model: call remove_hooks(model), or remove() of its "
            "OffloadHook, first; torch.compile takes it as it is"
        )

    def call_inner(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the replaced method.

        Raises:
            OffloadedError: The module was freed.
        """
        if self._binds:
            return self._function(self._alive(), *args, **kwargs)
        return self._function(*args, **kwargs)

    def remove(self) -> None:
        """Restore the module's own method."""
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
    """A replacement that runs hooks around a method, as torch does around a forward.

    Args:
        module: The module whose method is replaced.
        name: The name of the method.
        before: A function that returns the arguments for the method.
        after: A function that returns the result of the call; its `output` is None if the method failed.
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
        """Call the method between its hooks."""
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
        """Restore the module's own method; if another wrapper is around this one, only drop the hooks."""
        if getattr(self.module, self.name, None) is self:
            super().remove()
        else:
            self._before = None


class _AroundPart(Around):
    """The replacement for the forward of a part."""

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
        """Hide the callbacks from torch.compile, which would trace them."""
        self.enter = cast("Callable[[int], None]", torch.compiler.disable(self.enter))
        self.leave = cast("Callable[[int], None]", torch.compiler.disable(self.leave))


class _AroundModel(Around):
    """The replacement for the forward of the whole model, or for another method of it."""

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
            return self.call_inner(args, kwargs)  # the program holds weights used in place as they are
        # torch.compiler.disable imports torch._dynamo, which takes seconds: wait until it is imported.
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
    """Check that this call is not exported or traced: the program would hold stored weights and fetch none.

    Raises:
        OffloadedError: The call is exported or traced.
    """
    if torch.compiler.is_exporting() or torch.jit.is_tracing():
        raise OffloadedError(_CANNOT_BE_RECORDED)


def methods_of(module: nn.Module) -> list[str]:
    """Return the methods of a module beside its forward that compute with it. Pure."""
    return [
        name
        for name in _METHODS
        if isinstance(vars(module).get(name), Around | MethodType)
        or inspect.isfunction(inspect.getattr_static(type(module), name, None))  # evaluates no property
    ]


def listen(model: nn.Module, parts: Sequence[nn.Module], listener: Listener) -> list[Around]:
    """Call a listener around every use of a model and its parts; remove the returned objects in reverse order.

    Args:
        model: The model to listen to.
        parts: The modules of the model that are its parts.
        listener: The callbacks, which get the index of a part.
    """
    methods = methods_of(model)
    around = [_AroundPart(part, listener, index) for index, part in enumerate(parts)]
    return [*around, *(_AroundModel(model, name, listener, around) for name in (FORWARD, *methods))]


def check_removable(arounds: Sequence[Around]) -> None:
    """Check that all replacements can be removed, in reverse order.

    Raises:
        OffloadedError: The forward or another method of a module was replaced since.
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
