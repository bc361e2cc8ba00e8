"""Add `AlignDevicesHook`s to the modules of a model."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain_accelerate.models.align_devices import AlignDevicesHook
from drivetrain_accelerate.models.module_hooks import add_hook_to_module, hook_of
from drivetrain_accelerate.models.module_tensors import TiedCopies, Where, named_module_tensors
from drivetrain_accelerate.models.offload_folder import PrefixedDataset


@dataclass(frozen=True, kw_only=True)
class _Options:
    """The options that the hooks of all modules share."""

    weights_map: Mapping[str, Tensor] | None
    offload_buffers: bool
    skip_keys: str | list[str] | None
    preload_module_classes: Collection[str]
    tied_params_map: TiedCopies | None

    def hook(self, name: str, device: Where | None, *, whole: bool) -> AlignDevicesHook:
        """Return a hook that offloads the module of a name."""
        prefix = f"{name}." if name else ""
        weights = None if self.weights_map is None else PrefixedDataset(self.weights_map, prefix)
        return AlignDevicesHook(
            device, offload=True, weights_map=weights, offload_buffers=self.offload_buffers,
            place_submodules=whole, skip_keys=self.skip_keys, tied_params_map=self.tied_params_map,
        )  # fmt: skip


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Where,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedCopies | None = None,
) -> None:
    """Have a module and those inside that hold weights compute on a device, unless they have hooks.

    Args:
        module: The module; changed in place.
        execution_device: The device to compute on.
        skip_keys: Names of inputs that stay on their device.
        preload_module_classes: Names of classes whose modules are seen as one.
        tied_params_map: The copies of tied weights.
    """
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
    """Offload each module inside of one that holds weights itself, and bring it to a device at its forward.

    Args:
        module: The module; changed in place.
        execution_device: The device that computes.
        offload: Whether weights are offloaded.
        weights_map: The values of the weights by name; None to keep them in host memory.
        offload_buffers: Whether buffers are offloaded too.
        module_name: The name of the module in `weights_map`.
        skip_keys: Names of inputs that stay on their device.
        preload_module_classes: Names of classes whose modules are brought as a whole.
        tied_params_map: The copies of tied weights.
    """
    options = _Options(
        weights_map=weights_map, offload_buffers=offload_buffers, skip_keys=skip_keys,
        preload_module_classes=preload_module_classes or (), tied_params_map=tied_params_map,
    )  # fmt: skip
    if offload:
        _offload(module, module_name, execution_device, options)
    else:
        _align(module, execution_device, options)


def _offload(module: nn.Module, name: str, device: Where | None, options: _Options) -> None:
    whole = type(module).__name__ in options.preload_module_classes
    if any(True for _ in named_module_tensors(module, recurse=whole)):
        add_hook_to_module(module, options.hook(name, device, whole=whole), append=True)
    for inner, child in module.named_children() if not whole else ():
        _offload(child, f"{name}.{inner}" if name else inner, device, options)


def _align(module: nn.Module, device: Where | None, options: _Options) -> None:
    whole = type(module).__name__ in options.preload_module_classes
    if any(True for _ in named_module_tensors(module, recurse=whole)):
        hook = AlignDevicesHook(
            device,
            place_submodules=whole,
            skip_keys=options.skip_keys,
            tied_params_map=options.tied_params_map,
        )
        add_hook_to_module(module, hook, append=True)
    for child in module.children() if not whole else ():
        _align(child, device, options)


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
    """Have each named module inside of one compute on its device, offloaded or not.

    Args:
        module: The module; changed in place.
        execution_device: The device of each named module, or of all.
        offload: Whether each named module is offloaded, or all are.
        weights_map: The values of offloaded weights by name; None to keep them in host memory.
        offload_buffers: Whether buffers are offloaded too.
        module_name: The name of the module in the other arguments.
        skip_keys: Names of inputs that stay on their device.
        preload_module_classes: Names of classes whose modules are brought as a whole.
        tied_params_map: The copies of tied weights.
    """
    options = _Options(
        weights_map=weights_map, offload_buffers=offload_buffers, skip_keys=skip_keys,
        preload_module_classes=preload_module_classes or (), tied_params_map=tied_params_map,
    )  # fmt: skip
    if not isinstance(execution_device, Mapping) and not isinstance(offload, dict):
        _attach_to_all(module, execution_device, offload, options)
        return
    names = execution_device if isinstance(execution_device, Mapping) else offload
    assert isinstance(names, dict)
    named: dict[str, Any] = dict(names)
    devices = (
        execution_device if isinstance(execution_device, Mapping) else dict.fromkeys(named, execution_device)
    )
    offloaded = offload if isinstance(offload, dict) else dict.fromkeys(named, offload)
    _attach_to_blocks(module, module_name, devices, offloaded, options)


def _attach_to_all(module: nn.Module, device: Where | None, offload: bool, options: _Options) -> None:
    if offload:
        _offload(module, "", device, options)
        return
    hook = AlignDevicesHook(
        device, io_same_device=True, place_submodules=True, skip_keys=options.skip_keys,
        tied_params_map=options.tied_params_map,
    )  # fmt: skip
    add_hook_to_module(module, hook)


def _attach_to_blocks(
    module: nn.Module,
    name: str,
    devices: Mapping[str, Where | None],
    offload: Mapping[str, bool],
    options: _Options,
) -> None:
    device = devices.get(name)
    if name in devices and not offload.get(name, False):
        hook = AlignDevicesHook(
            device, io_same_device=name == "", place_submodules=name != "" or len(devices) == 1,
            skip_keys=options.skip_keys, tied_params_map=options.tied_params_map,
        )  # fmt: skip
        add_hook_to_module(module, hook)
        if device is not None and name:
            attach_execution_device_hook(module, device, tied_params_map=options.tied_params_map)
    elif name in devices:
        _offload(module, name, device, options)
        if name == "":
            add_hook_to_module(module, AlignDevicesHook(device, io_same_device=True), append=True)
        if device is not None:
            attach_execution_device_hook(
                module,
                device,
                options.skip_keys,
                list(options.preload_module_classes),
                options.tied_params_map,
            )
    elif name == "":
        add_hook_to_module(
            module, AlignDevicesHook(io_same_device=True, skip_keys=options.skip_keys), append=True
        )
    for inner, child in module.named_children():
        full = f"{name}.{inner}" if name else inner
        if any(entry == full or entry.startswith(f"{full}.") for entry in devices):
            _attach_to_blocks(child, full, devices, offload, options)
