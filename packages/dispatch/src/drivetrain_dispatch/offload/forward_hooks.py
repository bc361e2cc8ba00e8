"""Wrap the forward of a model and of its units, and other methods that compute with a model.

Forwards are replaced rather than hooked: torch's hooks cost a module more than all the rest of this package, cannot
undo their work when an earlier hook fails, and cover only the forward. Autoencoders have `encode` and `decode`.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import WRAPPER_ASSIGNMENTS
from types import MethodType
from typing import Any, NoReturn, Protocol, TypeAlias, cast
from weakref import ref

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from drivetrain_dispatch.compat import is_compiler_imported
from drivetrain_dispatch.errors import OffloadedError

FORWARD = "forward"
# The methods beside the forward by which callers compute with a model, if it has them.
_METHODS = ("encode", "decode")


class NotCopied:
    """A base class of objects in a dispatched model that cannot be copied or pickled with it."""

    def __reduce__(self) -> NoReturn:
        raise OffloadedError(
            "a dispatched model cannot be copied or pickled as a whole: save its state_dict(), or call "
            "remove_hooks(model), or remove() of its OffloadHook, first"
        )


# A function that runs in place of a method; it gets the wrapper, by which it calls the method, and the arguments.
Around: TypeAlias = Callable[["MethodWrapper", tuple[Any, ...], dict[str, Any]], Any]


class MethodWrapper(NotCopied):
    """A replacement for a module's forward or another method, in place until `remove` is called."""

    def __init__(self, module: nn.Module, name: str, around: Around) -> None:
        method: Callable[..., Any] = getattr(module, name)
        self.name = name
        self._around: Around | None = around
        # The module holds the wrapper: a model without other references is freed at once.
        self._module = ref(module)
        self._was_own = name in module.__dict__
        self._binds = not self._was_own and isinstance(method, MethodType) and method.__self__ is module
        self._function = cast("MethodType", method).__func__ if self._binds else method
        for attribute in WRAPPER_ASSIGNMENTS:
            if hasattr(method, attribute):
                setattr(self, attribute, getattr(method, attribute))
        setattr(module, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `around` in place of the method."""
        if self._around is None:
            return self.call_original(args, kwargs)
        return self._around(self, args, kwargs)

    def call_original(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the replaced method."""
        if self._binds:
            return self._function(self.alive_module(), *args, **kwargs)
        return self._function(*args, **kwargs)

    def alive_module(self) -> nn.Module:
        """Return the module."""
        module = self._module()
        if module is None:
            raise OffloadedError(
                f"the {self.name} of a dispatched model, or of a part of it, was called after the model was deleted: "
                "hold the model itself as long as you call its methods"
            )
        return module

    @property
    def module(self) -> nn.Module | None:
        """The module; None once it is freed."""
        return self._module()

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The replaced method, whose signature `inspect.signature` returns."""
        return MethodType(self._function, self.alive_module()) if self._binds else self._function

    @property
    def __code__(self) -> Any:
        """The code of the replaced method; torch.export reads argument names from it."""
        return cast("Any", self.__wrapped__).__code__

    @property
    def __globals__(self) -> Any:
        """An attribute for torch.jit.script alone; access raises, as a dispatched model cannot be scripted."""
        raise AttributeError(
            "torch.jit.script cannot compile a dispatched model: call remove_hooks(model), or remove() of its "
            "OffloadHook, first; torch.compile takes it as it is"
        )

    def remove(self) -> None:
        """Restore the module's own method. If another replacement came later, only drop `around`."""
        self._around = None
        module = self._module()
        if module is None or getattr(module, self.name, None) is not self:
            return
        if self._was_own:
            setattr(module, self.name, self._function)
        else:
            delattr(module, self.name)


def check_removable(wrappers: Sequence[MethodWrapper]) -> None:
    """Check that all wrappers can be removed, in reverse order."""
    outermost: dict[tuple[nn.Module, str], object] = {}
    for wrapper in reversed(wrappers):
        module, name = wrapper.module, wrapper.name
        if module is None:
            continue
        if outermost.get((module, name), getattr(module, name)) is not wrapper:
            raise OffloadedError(
                f"the {name} of {type(module).__name__} was replaced after the model was dispatched: undo that "
                "before the hooks are removed"
            )
        outermost[module, name] = wrapper.__wrapped__


def methods_of(module: nn.Module) -> list[str]:
    """Return the methods of a module, other than its forward, that compute with it. Pure."""
    return [
        name
        for name in _METHODS
        if isinstance(vars(module).get(name), MethodWrapper | MethodType)
        or inspect.isfunction(inspect.getattr_static(type(module), name, None))  # evaluates no property
    ]


def hook_calls(
    module: nn.Module,
    before: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]],
    after: Callable[[nn.Module, tuple[Any, ...], Any], Any] | None = None,
) -> list[RemovableHandle | MethodWrapper]:
    """Run hooks around the methods of a module that compute; remove the handles in reverse order.

    `before` returns the arguments, and `after` the result. After a failed call, `after` gets None for the result.
    """

    def around(method: MethodWrapper, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module, output = method.alive_module(), None
        args, kwargs = before(module, args, kwargs)
        try:
            output = method.call_original(args, kwargs)
        finally:
            if after is not None:
                output = after(module, args, output)
        return output

    handles: list[RemovableHandle | MethodWrapper] = [
        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
    ]
    if after is not None:
        handles.append(module.register_forward_hook(after, always_call=True))
    return handles + [MethodWrapper(module, name, around) for name in methods_of(module)]


class Listener(Protocol):
    """The callbacks for uses of a whole model."""

    def begin(self, method: str) -> None:
        """Begin a call of the model's forward, or of the method of that name; calls may be nested."""

    def end(self, *, completed: bool) -> None:
        """End a call whose `begin` succeeded; `completed` is True if the call did not fail."""


class UnitListener(Listener, Protocol):
    """The callbacks for uses of a model and of its units, nested in any order and from any thread."""

    def enter(self, index: int) -> None:
        """Begin a call of a unit."""

    def leave(self, index: int) -> None:
        """End a call of a unit, whether the call returned or failed; `enter` had succeeded."""


class _UnitCallbacks:
    """The callbacks that the wrappers of all units share."""

    def __init__(self, listener: UnitListener) -> None:
        self.enter: Callable[[int], None] = listener.enter
        self.leave: Callable[[int], None] = listener.leave
        self._hidden = False

    def hide_from_compiler(self) -> None:
        """Hide the callbacks from torch.compile, which would trace them."""
        # torch.compiler.disable imports the compiler, which takes seconds: wait until it is imported.
        if not self._hidden and is_compiler_imported():
            self._hidden = True
            self.enter = cast("Callable[[int], None]", torch.compiler.disable(self.enter))
            self.leave = cast("Callable[[int], None]", torch.compiler.disable(self.leave))

    def wrap(self, module: nn.Module, index: int) -> MethodWrapper:
        """Call `enter` and `leave` around the forward of a unit."""

        def around(wrapper: MethodWrapper, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            _check_not_recorded()
            self.enter(index)
            try:
                return wrapper.call_original(args, kwargs)
            finally:
                self.leave(index)

        return MethodWrapper(module, FORWARD, around)


def listen(model: nn.Module, listener: Listener) -> list[MethodWrapper]:
    """Call a listener around every use of a model; remove the returned wrappers in reverse order."""

    def around(wrapper: MethodWrapper, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_exporting():
            return wrapper.call_original(args, kwargs)  # the program holds the weights as they are
        return _call_between(listener, wrapper, args, kwargs)

    return _wrap_methods(model, around)


def listen_to_units(
    model: nn.Module, units: Sequence[nn.Module], listener: UnitListener
) -> list[MethodWrapper]:
    """Call a listener around every use of a model and of its units; remove the wrappers in reverse order."""
    callbacks = _UnitCallbacks(listener)

    def around(wrapper: MethodWrapper, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _check_not_recorded()
        callbacks.hide_from_compiler()
        return _call_between(listener, wrapper, args, kwargs)

    wrapped_units = [callbacks.wrap(module, index) for index, module in enumerate(units)]
    return wrapped_units + _wrap_methods(model, around)


def _wrap_methods(model: nn.Module, around: Around) -> list[MethodWrapper]:
    return [MethodWrapper(model, name, around) for name in (FORWARD, *methods_of(model))]


def _call_between(
    listener: Listener, wrapper: MethodWrapper, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    completed = False
    listener.begin(wrapper.name)
    try:
        output = wrapper.call_original(args, kwargs)
        completed = True
    finally:
        listener.end(completed=completed)
    return output


def _check_not_recorded() -> None:
    """Check that this call is not exported or traced, as the exported program would never fetch weights."""
    if torch.compiler.is_exporting() or torch.jit.is_tracing():
        raise OffloadedError(
            "weights of this model come and go, which torch.export and torch.jit.trace cannot record: call "
            "remove_hooks(model) first, and dispatch the model again afterwards; torch.compile takes it as it is"
        )
