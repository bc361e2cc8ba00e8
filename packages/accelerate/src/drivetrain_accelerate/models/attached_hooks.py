"""Add `AlignDevicesHook`s to the modules of a model."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drivetrain_accelerate.models.align_devices import AlignDevicesHook
from drivetrain_accelerate.models.module_hooks import add_hook_to_module, hook_of
from drivetrain_accelerate.models.module_tensors import TiedCopies, Where, named_module_tensors
from drivetrain_accelerate.models.offload_folder import PrefixedDataset


@dataclass(frozen=True)
class _Hooks:
    """The options that the hooks of all modules share, and how they are added."""

    weights_map: Mapping[str, Tensor] | None
    offload_buffers: bool
    skip_keys: str | list[str] | None
    preload_module_classes: list[str] | None
    tied_params_map: TiedCopies | None

    def add_to_each(self, module: nn.Module, name: str, device: Where | None, *, offload: bool) -> None:
        """Add a hook to each module inside of one, of this name, that holds weights itself."""
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
        """Add hooks to the modules that are named, inside of one of this name."""
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
    """Have a module and those inside that hold weights compute on a device, unless they have hooks."""
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
    """Offload each module inside of one that holds weights itself, and bring it to a device at its forward."""
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
    """Have each named module inside of one compute on its device, offloaded or not."""
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
