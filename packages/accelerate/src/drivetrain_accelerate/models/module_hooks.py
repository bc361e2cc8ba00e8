"""Hooks that run before and after the forward of a module, for instance to move its weights."""

import re
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import nn

from drivetrain_accelerate.models.module_tensors import Where
from drivetrain_accelerate.plugins.constants import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
from drivetrain_dispatch import remove_hooks
from drivetrain_dispatch.model.model_layout import listed
from drivetrain_dispatch.offload.device_transfer import move_to_device
from drivetrain_dispatch.offload.dispatch import is_dispatched
from drivetrain_dispatch.planning.device_map import place_of

AnyModule = TypeVar("AnyModule", bound=nn.Module)
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]  # of a forward, by position and by name

# The names of the attributes that libraries read.
HOOK = "_hf_hook"
OLD_FORWARD = "_old_forward"
DEVICE_MAP = "hf_device_map"


class ModelHook:
    """The base class of hooks, whose methods do nothing. With `no_grad`, the forward runs without gradients."""

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Run when the hook is added to a module; return the module."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Run before the forward; return the arguments for it."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Run after the forward; return the output of the call."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Run when the hook is removed from a module; return the module."""
        return module


class SequentialHook(ModelHook):
    """A hook that runs several other hooks in order."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Call `init_hook` of all hooks, and return the module."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Call `pre_forward` of all hooks; each hook gets the arguments that the hook before has returned."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Call `post_forward` of all hooks; each hook gets the output that the hook before has returned."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Call `detach_hook` of all hooks, and return the module."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def hook_of(module: nn.Module) -> Any:
    """Return the hook of a module; None if it has none."""
    return vars(module).get(HOOK)


def add_hook_to_module(module: AnyModule, hook: ModelHook, append: bool = False) -> AnyModule:
    """Add a hook to a module, whose forward is kept as `_old_forward`."""
    if (present := hook_of(module)) is not None:
        remove_hook_from_module(module)
        hook = SequentialHook(present, hook) if append else hook
    if OLD_FORWARD not in vars(module):
        setattr(module, OLD_FORWARD, module.forward)
    changed = cast("AnyModule", hook.init_hook(module))
    setattr(changed, HOOK, hook)
    # A partial of a function of this module: it is copied and pickled with the module that it is bound to.
    changed.forward = update_wrapper(partial(_call_with_hook, changed), getattr(changed, OLD_FORWARD))
    return changed


def remove_hook_from_module(module: AnyModule, recurse: bool = False) -> AnyModule:
    """Remove the hook of a module; with `recurse`, of its submodules too."""
    for each in list(module.modules()) if recurse else [module]:
        _remove(each)
    if recurse:
        forget_dispatch(module)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of a module and of all modules inside; undo the dispatch of a dispatched model."""
    remove_hook_from_module(module, recurse=True)


def forget_dispatch(module: nn.Module) -> None:
    """Undo the dispatch of all models in a module; keep `hf_device_map`, since libraries read it later."""
    for model in [each for each in module.modules() if is_dispatched(each)]:
        device_map = vars(model).get(DEVICE_MAP)
        remove_hooks(model)
        if device_map is not None:
            setattr(model, DEVICE_MAP, device_map)


def _remove(module: nn.Module) -> None:
    own = vars(module)
    forward: Any = own.get("forward")
    is_hooked = isinstance(forward, partial) and cast("partial[Any]", forward).func is _call_with_hook
    if is_hooked and HOOK in own:
        own[HOOK].detach_hook(module)
    own.pop(HOOK, None)
    old = own.pop(OLD_FORWARD, None)
    if is_hooked and old is not None:
        forward = module.forward = old
    # The forward of the class is none of the module's own attributes.
    if (
        getattr(forward, "__self__", None) is module
        and getattr(forward, "__func__", None) is type(module).forward
    ):
        del module.forward


def _call_with_hook(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a module between the methods of its hook."""
    hook: ModelHook = getattr(module, HOOK)
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    with torch.no_grad() if hook.no_grad else nullcontext():
        output = getattr(module, OLD_FORWARD)(*args, **kwargs)
    return hook.post_forward(module, output)


@dataclass(eq=False)
class LayerwiseCastingHook(ModelHook):
    """A hook that converts a layer's weights to the compute dtype for the forward, and back to the storage dtype."""

    storage_dtype: torch.dtype
    compute_dtype: torch.dtype
    non_blocking: bool

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Convert the weights to the storage dtype."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Convert the weights to the compute dtype."""
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: object) -> object:
        """Convert the weights back."""
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Add a `LayerwiseCastingHook` to each linear layer, convolution and embedding in a module."""
    patterns = listed(skip_modules_pattern or ())

    def attach(each: nn.Module, name: str) -> None:
        if isinstance(each, skip_modules_classes or ()) or any(re.search(one, name) for one in patterns):
            return
        if isinstance(each, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
            hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
            add_hook_to_module(each, hook, append=True)
            return
        for inner, child in each.named_children():
            attach(child, f"{name}.{inner}" if name else inner)

    attach(module, "")


class CpuOffload(ModelHook):
    """A hook that moves a model to its device when it is called. The model stays on the device afterwards."""

    def __init__(
        self, execution_device: Where | None = None, prev_module_hook: "UserCpuOffloadHook | None" = None
    ) -> None:
        self.prev_module_hook = prev_module_hook
        if execution_device is None and (
            found := torch.accelerator.current_accelerator(check_available=True)
        ):
            execution_device = torch.device(found.type, torch.accelerator.current_device_index())
        self.execution_device: Where = "cpu" if execution_device is None else execution_device

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the model to the host."""
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Move the previous hook's model to the host, and this model and its inputs to the device."""
        device = place_of(self.execution_device)
        assert isinstance(device, torch.device)
        if self.prev_module_hook is not None:
            self.prev_module_hook.offload()
        module.to(device)
        return move_to_device(args, device), move_to_device(kwargs, device)


@dataclass(eq=False)
class UserCpuOffloadHook:
    """A model and its hook; the program moves the model to the host by `offload`."""

    model: nn.Module
    hook: ModelHook

    def offload(self) -> None:
        """Move the model to the host."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook; the model stays where it is."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: Where | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a model in host memory until it is called, then on the device until the next model is called."""
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)
