"""Place a model by a device map, or all of it on the host or the disk, and fetch its weights when they are used."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from drivetrain_accelerate.interface.replaced import in_use
from drivetrain_accelerate.models.device_maps import check_device_map, names_on, present_classes
from drivetrain_accelerate.models.dispatched import forget_dispatch, show_map
from drivetrain_accelerate.models.dispatched_hook import DispatchedHook
from drivetrain_accelerate.models.module_hooks import HOOK, OLD_FORWARD, hook_of
from drivetrain_accelerate.models.module_tensors import Where
from drivetrain_accelerate.models.offload_folder import Entry
from drivetrain_accelerate.models.offloaded_sources import WeightSources, fill_from_sources
from drivetrain_dispatch import DeviceMap
from drivetrain_dispatch import dispatch_model as dispatch
from drivetrain_dispatch.model.model_layout import ModelLayout
from drivetrain_dispatch.model.sizes import listed, nearest_entry
from drivetrain_dispatch.planning.device_map import place_of
from drivetrain_dispatch.planning.placement import Placement, placements_of

AnyModule = TypeVar("AnyModule", bound=nn.Module)
Folder = str | PathLike[str]


def dispatch_model(
    model: AnyModule,
    device_map: dict[str, str | int | torch.device],
    main_device: torch.device | None = None,
    state_dict: dict[str, Tensor] | None = None,
    offload_dir: Folder | None = None,
    offload_index: dict[str, Entry] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
) -> AnyModule:
    """Place each part of a model by a device map, and prefetch offloaded weights while earlier modules compute.

    Args:
        model: The model; changed in place.
        device_map: Devices by the names of modules, parameters or buffers; "disk" for files.
        main_device: The accelerator for modules that the map names before any; by default the first in the map.
        state_dict: The values of weights that the model has on the meta device.
        offload_dir: The folder for weights on the disk that are in no file yet, or the one that holds them.
        offload_index: The index of files that hold the values of weights that the model has on the meta device.
        offload_buffers: Whether buffers are offloaded too.
        skip_keys: Keyword arguments that stay on their device.
        preload_module_classes: Names of module classes whose weights are fetched all at once.
        force_hooks: Whether a model on one device gets hooks too.

    Returns:
        The same model. Its attribute `hf_device_map` is the map.

    Raises:
        ValueError: The map does not cover the model, or weights are for the disk and nothing says where.
    """
    in_use("accelerate.big_modeling.check_device_map", check_device_map)(model, device_map)
    forget_dispatch(model)
    sources = fill_from_sources(model, state_dict, offload_dir, offload_index)
    places = {place_of(device) for device in device_map.values()}
    if len(places) == 1 and places != {"disk"} and not (force_hooks or _is_packed(model)):
        (place,) = places
        model.to(place)
        show_map(model, dict(device_map))
        return model
    covering = _covering(model, device_map, sources)
    _check_folder(model, covering, sources, offload_dir)
    return _dispatch(
        model, covering, sources, shown=device_map, main_device=main_device, offload_dir=offload_dir,
        offload_buffers=offload_buffers, skip_keys=skip_keys, preload_module_classes=preload_module_classes,
    )  # fmt: skip


def cpu_offload(
    model: AnyModule,
    execution_device: torch.device | None = None,
    offload_buffers: bool = False,
    state_dict: dict[str, Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
) -> AnyModule:
    """Keep all weights of a model in host memory, and prefetch each while earlier modules compute.

    Args:
        model: The model; changed in place.
        execution_device: The device that computes; None for that of the first parameter.
        offload_buffers: Whether buffers are offloaded too.
        state_dict: The values of weights that the model has on the meta device.
        preload_module_classes: Names of module classes whose weights are fetched all at once.

    Returns:
        The same model.
    """
    device = _device_of(model) if execution_device is None else execution_device
    forget_dispatch(model)
    sources = fill_from_sources(model, state_dict, None, None)
    return _dispatch(
        model, {"": "cpu"}, sources, main_device=device, offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
    )  # fmt: skip


def disk_offload(
    model: AnyModule,
    offload_dir: Folder,
    execution_device: torch.device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
) -> AnyModule:
    """Write the weights of a model to a file, and use them from there.

    Args:
        model: The model; changed in place. What is on the meta device is in the folder already.
        offload_dir: The folder for the file.
        execution_device: The device that computes; None for that of the first parameter.
        offload_buffers: Whether buffers are offloaded too.
        preload_module_classes: Names of module classes whose weights are fetched all at once.

    Returns:
        The same model.
    """
    device = _device_of(model) if execution_device is None else execution_device
    forget_dispatch(model)
    sources = fill_from_sources(model, None, offload_dir, None)
    return _dispatch(
        model, {"": "disk"}, sources, main_device=torch.device("cpu") if device.type == "meta" else device,
        offload_dir=offload_dir, offload_buffers=offload_buffers, preload_module_classes=preload_module_classes,
    )  # fmt: skip


def _dispatch(
    model: AnyModule,
    device_map: Mapping[str, Where],
    sources: WeightSources,
    *,
    shown: Mapping[str, Where] | None = None,
    main_device: Where | None = None,
    offload_dir: Folder | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
) -> AnyModule:
    """Dispatch a model, and show libraries what they look for."""
    layout = ModelLayout.of(model)
    placements = placements_of(layout, device_map, main_device=main_device, offload_buffers=offload_buffers)
    in_files = {name: file for name, file in sources.mapped.items() if name in layout.tensors}
    dispatch(
        model, device_map, main_device=main_device, offload_dir=None if offload_dir is None else Path(offload_dir),
        offload_buffers=offload_buffers, skip_keys=tuple(listed(skip_keys or ())), mapped=in_files,
        preload_module_classes=present_classes(model, preload_module_classes),
        dtypes={name: dtype for name, dtype in sources.dtypes.items() if name in layout.tensors},
    )  # fmt: skip
    vars(model).pop("hf_device_map", None)
    if shown is not None:
        show_map(model, dict(shown))
    show_hooks(model, placements, main_device)
    return model


def show_hooks(
    model: nn.Module, placements: Mapping[str, Placement], main_device: Where | None = None
) -> None:
    """Give the modules of a dispatched model the hooks that libraries look for, which do not run.

    Each says which device computes the module. `_old_forward` is the forward as the dispatch has made it.
    """
    devices = {name.rpartition(".")[0]: placement.device for name, placement in placements.items()}
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, device in devices.items():
        if name and hook_of(modules[name]) is None:
            _show(modules[name], DispatchedHook(device, module=modules[name]))
    if hook_of(model) is None:
        first = next(iter(devices.values()), None) if main_device is None else main_device
        _show(model, DispatchedHook(first, io_same_device=True, module=model))


def _show(module: nn.Module, hook: DispatchedHook) -> None:
    setattr(module, HOOK, hook)
    if OLD_FORWARD not in vars(module):
        setattr(module, OLD_FORWARD, module.forward)


def _covering(model: nn.Module, device_map: Mapping[str, Where], sources: WeightSources) -> dict[str, Where]:
    """Return a map without names that the model lacks, in which tensors without a device stay where they are."""
    layout = ModelLayout.of(model)
    known = {
        name: device
        for name, device in device_map.items()
        if name in layout.modules or name in layout.tensors
    }
    left = {
        name: tensor.device for name, tensor in layout.tensors.items() if nearest_entry(name, known) is None
    }
    covering: dict[str, Where] = {**left, **known, **dict.fromkeys(sources.in_memory, "cpu")}
    if isinstance(device_map, DeviceMap):
        return DeviceMap(covering, window_bytes=device_map.window_bytes)
    return covering


def _check_folder(
    model: nn.Module, device_map: Mapping[str, Where], sources: WeightSources, offload_dir: Folder | None
) -> None:
    if offload_dir is not None:
        return
    layout = ModelLayout.of(model)
    written = [
        name
        for name in layout.parameters
        if name not in sources.mapped and device_map.get(nearest_entry(name, device_map) or "") == "disk"
    ]
    if written:
        raise ValueError(
            f"device_map puts {', '.join(map(repr, names_on(device_map, 'disk')))} on the disk, and {written[0]!r} "
            "is in no file yet: name a folder for such weights, offload_dir=..."
        )


def _is_packed(model: Any) -> bool:
    """Return whether bitsandbytes has quantised a model, which then must not be moved."""
    return any(
        getattr(model, name, False) for name in ("is_quantized", "is_loaded_in_8bit", "is_loaded_in_4bit")
    )


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
