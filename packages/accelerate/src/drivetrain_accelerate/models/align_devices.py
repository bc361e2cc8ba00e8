"""The hook that moves a module's weights and inputs to its device and back, and functions that add it to models."""

import inspect
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain_accelerate.models.module_hooks import (
    OLD_FORWARD,
    Arguments,
    ModelHook,
    add_hook_to_module,
    hook_of,
)
from drivetrain_accelerate.models.module_tensors import (
    TiedCopies,
    Where,
    device_of,
    named_module_tensors,
    set_module_tensor_to_device,
)
from drivetrain_accelerate.models.offload_folder import PrefixedDataset
from drivetrain_dispatch.model.model_layout import listed
from drivetrain_dispatch.offload.device_transfer import first_device, move_to_device
from drivetrain_dispatch.offload.forward_hooks import MethodWrapper

_META = torch.device("meta")


@dataclass(eq=False, repr=False)
class AlignDevicesHook(ModelHook):
    """A hook that moves a module's weights and inputs to one device for the forward."""

    execution_device: Where | None = None
    offload: bool = False
    io_same_device: bool = False
    weights_map: Mapping[str, Tensor] | None = None
    offload_buffers: bool = False
    place_submodules: bool = False
    skip_keys: str | list[str] | None = None
    tied_params_map: TiedCopies | None = None
    input_device: torch.device | None = field(default=None, init=False)
    original_devices: dict[str, torch.device] = field(default_factory=dict[str, torch.device], init=False)

    def __repr__(self) -> str:
        shown = (
            f"{name}={getattr(self, name)}"
            for name in inspect.signature(AlignDevicesHook).parameters
            if not name.endswith("_map")
        )
        return f"AlignDevicesHook({', '.join(shown)})"

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the weights of the module to its device; with `offload`, to the meta device."""
        # A dispatch sees to the weights of a module whose forward it has replaced.
        is_dispatched = any(
            isinstance(vars(module).get(each), MethodWrapper) for each in ("forward", OLD_FORWARD)
        )
        if not self.offload and (self.execution_device is None or is_dispatched):
            return module
        tensors = dict(named_module_tensors(module, recurse=self.place_submodules))
        offloaded = self._offloaded(module) if self.offload else []
        if self.offload:
            self.original_devices = {name: tensor.device for name, tensor in tensors.items()}
            if self.weights_map is None:
                self.weights_map = {name: tensors[name].detach().to("cpu") for name in offloaded}
        for name in offloaded:
            set_module_tensor_to_device(module, name, _META)
        if self.execution_device is not None:
            for name in tensors:
                if name not in offloaded:
                    self._set(module, name, self.execution_device)
        return module

    def _offloaded(self, module: nn.Module) -> list[str]:
        """Return the names of the tensors to offload; buffers that are not saved stay, since no map holds them."""
        found = named_module_tensors(
            module, self.offload_buffers, self.place_submodules, remove_non_persistent=True
        )
        return [name for name, _ in found]

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Bring the weights of the module and its inputs to the device."""
        if self.io_same_device:
            self.input_device = first_device((args, kwargs))
        if self.offload and self.weights_map is not None:
            target = self.execution_device
            for name in self._offloaded(module):
                value = self.weights_map[name]
                self._set(module, name, value.device if target is None else target, value)
        if self.execution_device is None:
            return args, kwargs
        return self._sent(args, self.execution_device), self._sent(kwargs, self.execution_device)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Remove offloaded weights from the device, and send the output to the device of the inputs."""
        if self.offload:
            for name in self._offloaded(module):
                set_module_tensor_to_device(module, name, _META)
            for copies in (self.tied_params_map or {}).values():
                if self.execution_device is not None:
                    copies.pop(device_of(self.execution_device), None)
        if self.io_same_device and self.input_device is not None:
            output = self._sent(output, self.input_device)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Move offloaded weights back to their original devices."""
        if self.offload and self.weights_map is not None:
            for name in self._offloaded(module):
                if (device := self.original_devices.get(name, _META)) != _META:
                    set_module_tensor_to_device(module, name, device, value=self.weights_map[name])
        return module

    def _set(self, module: nn.Module, name: str, device: Where, value: Tensor | None = None) -> None:
        set_module_tensor_to_device(module, name, device, value=value, tied_params_map=self.tied_params_map)

    def _sent(self, value: Any, device: Where) -> Any:
        return move_except(value, device_of(device), listed(self.skip_keys or ()))


def move_except(value: Any, device: torch.device, kept: Collection[str]) -> Any:
    """Return a nested value with its tensors moved to a device; a dict's items with the keys `kept` stay."""
    if kept and type(value) is dict:
        items: dict[str, Any] = value
        return {name: item if name in kept else move_to_device(item, device) for name, item in items.items()}
    moved = move_to_device(value, device)
    if kept and moved is not value and isinstance(value, dict):  # an output of a library, whose class stays
        given: dict[str, Any] = value
        for name in given.keys() & set(kept):
            moved[name] = given[name]
    return moved


def has_offloaded_params(module: nn.Module) -> bool:
    """Return whether the weights of a module are on the meta device between its forwards.

    Weights that `dispatch_model` has offloaded are never there: host memory or the pages of a file hold them.
    """
    hook = hook_of(module)
    return isinstance(hook, AlignDevicesHook) and hook.offload


@contextmanager
def align_module_device(module: nn.Module, execution_device: torch.device | None = None) -> Generator[None]:
    """Run the block with the weights of a module on a device; afterwards, move the weights back."""
    hook = hook_of(module)
    if isinstance(hook, AlignDevicesHook) and hook.offload:
        before = hook.execution_device
        if execution_device is not None:
            hook.execution_device = execution_device
        try:
            hook.pre_forward(module)
            yield
        finally:
            hook.post_forward(module, None)
            hook.execution_device = before
    elif execution_device is not None:
        devices = {name: parameter.device for name, parameter in module.named_parameters(recurse=False)}
        try:
            for name in devices:
                set_module_tensor_to_device(module, name, execution_device)
            yield
        finally:
            for name, device in devices.items():
                set_module_tensor_to_device(module, name, device)
    else:
        yield


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a model with the values of offloaded weights, in host memory."""
    held = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    for prefix, module in model.named_modules():
        if has_offloaded_params(module) and any(tensor.is_meta for tensor in module.state_dict().values()):
            with align_module_device(module, torch.device("cpu")):
                inner = {
                    f"{prefix}.{name}" if prefix else name: each for name, each in module.state_dict().items()
                }
                held |= {name: each.detach().clone() for name, each in inner.items() if not each.is_meta}
    return held


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: dict[str, str | Tensor],
    device_to_put_offload: Where = "cpu",
) -> dict[str, str | Tensor]:
    """Replace the entries of an offloaded module in a state dict by the values of its weights."""
    root = module_name.rpartition(".")[0]
    prefix = f"{root}." if root else ""
    with align_module_device(module, device_of(device_to_put_offload)):
        for name, value in module.state_dict().items():
            if prefix + name in state_dict:
                state_dict[prefix + name] = value.detach().clone()
    return state_dict


@dataclass(frozen=True)
class _Hooks:
    """The options that the hooks of all modules share, and the methods that add the hooks."""

    weights_map: Mapping[str, Tensor] | None
    offload_buffers: bool
    skip_keys: str | list[str] | None
    preload_module_classes: list[str] | None
    tied_params_map: TiedCopies | None

    def add_to_each(self, module: nn.Module, name: str, device: Where | None, *, offload: bool) -> None:
        """Add a hook to a module and its submodules, wherever a module itself holds weights; `name` is its name."""
        whole = type(module).__name__ in (self.preload_module_classes or ())
        if any(True for _ in named_module_tensors(module, recurse=whole)):
            weights = self.weights_map if offload else None
            hook = AlignDevicesHook(
                device,
                offload=offload,
                weights_map=None if weights is None else PrefixedDataset(weights, f"{name}." if name else ""),
                offload_buffers=offload and self.offload_buffers,
                place_submodules=whole,
                skip_keys=self.skip_keys,
                tied_params_map=self.tied_params_map,
            )
            add_hook_to_module(module, hook, append=True)
        for inner, child in module.named_children() if not whole else ():
            self.add_to_each(child, f"{name}.{inner}" if name else inner, device, offload=offload)

    def add_to_blocks(
        self, module: nn.Module, name: str, devices: Mapping[str, Where | None], offload: Mapping[str, bool]
    ) -> None:
        """Add hooks to the submodules that `devices` names; `name` is the full name of `module`."""
        device, is_offloaded = devices.get(name), name in devices and offload.get(name, False)
        if is_offloaded:
            self.add_to_each(module, name, device, offload=True)
        elif name in devices:
            hook = AlignDevicesHook(
                device,
                io_same_device=name == "",
                place_submodules=name != "" or len(devices) == 1,
                skip_keys=self.skip_keys,
                tied_params_map=self.tied_params_map,
            )
            add_hook_to_module(module, hook)
        if name == "" and (is_offloaded or name not in devices):
            skip_keys = None if is_offloaded else self.skip_keys
            hook = AlignDevicesHook(device, io_same_device=True, skip_keys=skip_keys)
            add_hook_to_module(module, hook, append=True)
        if device is not None and is_offloaded:
            attach_execution_device_hook(
                module, device, self.skip_keys, self.preload_module_classes, self.tied_params_map
            )
        elif device is not None and name:
            attach_execution_device_hook(module, device, tied_params_map=self.tied_params_map)
        for inner, child in module.named_children():
            full = f"{name}.{inner}" if name else inner
            if any(entry == full or entry.startswith(f"{full}.") for entry in devices):
                self.add_to_blocks(child, full, devices, offload)


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Where,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedCopies | None = None,
) -> None:
    """Make a module and its submodules with weights compute on a device, unless they have hooks."""
    if hook_of(module) is None and module.state_dict():
        hook = AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
        add_hook_to_module(module, hook)
    if type(module).__name__ in (preload_module_classes or ()):
        return
    for child in module.children():
        attach_execution_device_hook(
            child, execution_device, skip_keys, preload_module_classes, tied_params_map
        )


def attach_align_device_hook(
    module: nn.Module,
    execution_device: torch.device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedCopies | None = None,
) -> None:
    """Add a hook to each submodule with weights of its own: it moves the weights to a device for the forward."""
    hooks = _Hooks(weights_map, offload_buffers, skip_keys, preload_module_classes, tied_params_map)
    hooks.add_to_each(module, module_name, execution_device, offload=offload)


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: torch.device | dict[str, torch.device] | None = None,
    offload: bool | dict[str, bool] = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedCopies | None = None,
) -> None:
    """Make each named submodule compute on its device; with `offload`, keep its weights elsewhere."""
    hooks = _Hooks(weights_map, offload_buffers, skip_keys, preload_module_classes, tied_params_map)
    if isinstance(execution_device, Mapping):
        flags = offload if isinstance(offload, dict) else dict.fromkeys(execution_device, offload)
        hooks.add_to_blocks(module, module_name, execution_device, flags)
    elif isinstance(offload, dict):
        hooks.add_to_blocks(module, module_name, dict.fromkeys(offload, execution_device), offload)
    elif offload:
        hooks.add_to_each(module, "", execution_device, offload=True)
    else:
        hooks.add_to_blocks(module, "", {"": execution_device}, {})
