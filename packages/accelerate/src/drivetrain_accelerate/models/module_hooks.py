"""Hooks that run before and after the forward of a module, and see to its weights."""

from functools import partial, update_wrapper
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import nn

from drivetrain_accelerate.models.dispatched import forget_dispatch

AnyModule = TypeVar("AnyModule", bound=nn.Module)

HOOK = "_hf_hook"  # the names of the attributes that libraries read
OLD_FORWARD = "_old_forward"


class ModelHook:
    """A base of hooks; each method does nothing.

    Attributes:
        no_grad: Whether the forward of the module runs without gradients.
    """

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Run when the hook is added to a module; return the module."""
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run before the forward; return the arguments for it."""
        del module
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Run after the forward; return the output of the call."""
        del module
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Run when the hook is removed from a module; return the module."""
        return module


class SequentialHook(ModelHook):
    """A hook that runs others, each method in their order.

    Args:
        hooks: The hooks to run.
    """

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Run those of all hooks."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run those of all hooks; each gets the arguments that the one before returned."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Run those of all hooks; each gets the output that the one before returned."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Run those of all hooks."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


class _Hooked(Protocol):
    """A module with a hook."""

    _hf_hook: ModelHook

    def _old_forward(self, *args: Any, **kwargs: Any) -> Any: ...


def hook_of(module: nn.Module) -> Any:
    """Return the hook of a module; None if it has none."""
    return vars(module).get(HOOK)


def add_hook_to_module(module: AnyModule, hook: ModelHook, append: bool = False) -> AnyModule:
    """Add a hook to a module, whose forward is kept as `_old_forward`.

    Args:
        module: The module; changed in place.
        hook: The hook to add.
        append: Whether a hook that the module has is kept and runs first; otherwise it is removed.

    Returns:
        The same module.
    """
    if append and (present := hook_of(module)) is not None:
        remove_hook_from_module(module)
        hook = SequentialHook(present, hook)
    if hook_of(module) is not None:
        remove_hook_from_module(module)
    if OLD_FORWARD not in vars(module):
        setattr(module, OLD_FORWARD, module.forward)
    changed = cast("AnyModule", hook.init_hook(module))
    setattr(changed, HOOK, hook)
    # A partial of a function of this module: it is copied and pickled with the module that it is bound to.
    changed.forward = update_wrapper(partial(_call_with_hook, changed), getattr(changed, OLD_FORWARD))
    return changed


def remove_hook_from_module(module: AnyModule, recurse: bool = False) -> AnyModule:
    """Remove the hook of a module, if it has one.

    Args:
        module: The module; changed in place.
        recurse: Whether the hooks of all modules inside are removed too. A dispatched model is then ordinary again.

    Returns:
        The same module.
    """
    for each in list(module.modules()) if recurse else [module]:
        _remove(each)
    if recurse:
        forget_dispatch(module)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of a module and of all modules inside; a dispatched model is then ordinary again."""
    remove_hook_from_module(module, recurse=True)


def _remove(module: nn.Module) -> None:
    hook = hook_of(module)
    if hook is not None:
        if _is_hooked(vars(module).get("forward")):
            hook.detach_hook(module)
        delattr(module, HOOK)
    if OLD_FORWARD in vars(module):
        if _is_hooked(vars(module).get("forward")):
            module.forward = getattr(module, OLD_FORWARD)
        delattr(module, OLD_FORWARD)
    _drop_if_same(module)


def _drop_if_same(module: nn.Module) -> None:
    """Take the forward out of a module's own attributes if it is just that of its class."""
    own = vars(module).get("forward")
    if getattr(own, "__self__", None) is module and getattr(own, "__func__", None) is type(module).forward:
        del module.forward


def _is_hooked(forward: object) -> bool:
    return isinstance(forward, partial) and cast("partial[Any]", forward).func is _call_with_hook


def _call_with_hook(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a module between the methods of its hook."""
    hooked = cast("_Hooked", module)
    hook = hooked._hf_hook  # pyright: ignore[reportPrivateUsage] the name is part of the interface
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    forward = hooked._old_forward  # pyright: ignore[reportPrivateUsage]
    if hook.no_grad:
        with torch.no_grad():
            output = forward(*args, **kwargs)
    else:
        output = forward(*args, **kwargs)
    return hook.post_forward(module, output)
