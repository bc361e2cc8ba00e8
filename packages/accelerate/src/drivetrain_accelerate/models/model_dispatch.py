"""Place a model by a device map, or wholly on the host or the disk, and fetch its weights when they are used."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

from drivetrain_accelerate.interface.interface_module import in_use
from drivetrain_accelerate.models.align_devices import AlignDevicesHook
from drivetrain_accelerate.models.device_maps import check_device_map, present_classes
from drivetrain_accelerate.models.module_hooks import (
    DEVICE_MAP,
    HOOK,
    OLD_FORWARD,
    Arguments,
    forget_dispatch,
    hook_of,
    remove_hook_from_module,
)
from drivetrain_accelerate.models.module_tensors import Where, named_module_tensors, put_tensor
from drivetrain_accelerate.models.offload_folder import Entry, OffloadedWeightsLoader, find_dtype
from drivetrain_dispatch import DeviceMap
from drivetrain_dispatch import dispatch_model as dispatch
from drivetrain_dispatch.loading.load_target import Assignment, LoadTarget, apply_assignments
from drivetrain_dispatch.model.model_layout import ModelLayout, listed, nearest_entry
from drivetrain_dispatch.offload.parameter import is_offloaded
from drivetrain_dispatch.planning.device_map import Placement, place_of, placements_of
from drivetrain_weights import MappedFile

_LOADED = "_drivetrain_accelerate_loaded"  # the attribute of a model by which a load tells the dispatch of its files
AnyModule = TypeVar("AnyModule", bound=nn.Module)
Folder = str | PathLike[str]


@dataclass(kw_only=True)
class WeightSources:
    """The files and dtypes of a model's weights, by name."""

    mapped: dict[str, MappedFile] = field(default_factory=dict[str, MappedFile])
    dtypes: dict[str, torch.dtype] = field(default_factory=dict[str, torch.dtype])  # converted to at use
    # Those that a device map puts on the disk, but that no file holds.
    in_memory: tuple[str, ...] = ()


def remember_sources(model: nn.Module, sources: WeightSources) -> None:
    """Store the places of a model's weights after a load, for the model's dispatch."""
    setattr(model, _LOADED, sources)


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

    A ValueError names tensors without a device in the map, or asks for a folder for weights on the disk.
    """
    in_use("accelerate.big_modeling.check_device_map", check_device_map)(model, device_map)
    _forget(model)
    sources = _fill_from_sources(model, state_dict, offload_dir, offload_index)
    places = {place_of(device) for device in device_map.values()}
    # bitsandbytes' weights must not be moved.
    is_quantized = any(
        getattr(model, name, False) for name in ("is_quantized", "is_loaded_in_8bit", "is_loaded_in_4bit")
    )
    if len(places) == 1 and places != {"disk"} and not (force_hooks or is_quantized):
        (place,) = places
        model.to(place)
    else:
        covering = _cover(ModelLayout.of(model), device_map, sources, has_folder=offload_dir is not None)
        _dispatch(
            model, covering, sources, main_device=main_device, offload_dir=offload_dir,
            offload_buffers=offload_buffers, skip_keys=skip_keys, preload_module_classes=preload_module_classes,
        )  # fmt: skip
    setattr(model, DEVICE_MAP, dict(device_map))
    return model


def cpu_offload(
    model: AnyModule,
    execution_device: torch.device | None = None,
    offload_buffers: bool = False,
    state_dict: dict[str, Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
) -> AnyModule:
    """Keep all weights of a model in host memory, and prefetch each weight while earlier modules compute."""
    return _offload(model, "cpu", execution_device, state_dict, None, offload_buffers, preload_module_classes)


def disk_offload(
    model: AnyModule,
    offload_dir: Folder,
    execution_device: torch.device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
) -> AnyModule:
    """Write the weights of a model to a file, and fetch them from the file at each use."""
    return _offload(
        model, "disk", execution_device, None, offload_dir, offload_buffers, preload_module_classes
    )


def _offload(
    model: AnyModule,
    place: str,
    device: torch.device | None,
    state_dict: dict[str, Tensor] | None,
    offload_dir: Folder | None,
    offload_buffers: bool,
    preload_module_classes: list[str] | None,
) -> AnyModule:
    """Dispatch a model with all weights in one place; `device` defaults to that of the first parameter."""
    if device is None:
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if place == "disk" and device.type == "meta":
        device = torch.device("cpu")
    _forget(model)
    sources = _fill_from_sources(model, state_dict, offload_dir, None)
    return _dispatch(
        model, {"": place}, sources, main_device=device, offload_dir=offload_dir, offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
    )  # fmt: skip


def _dispatch(
    model: AnyModule,
    device_map: Mapping[str, Where],
    sources: WeightSources,
    *,
    main_device: Where | None = None,
    offload_dir: Folder | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
) -> AnyModule:
    """Dispatch a model, and add the hooks that libraries look for, but not the device map."""
    layout = ModelLayout.of(model)
    placements = placements_of(layout, device_map, main_device=main_device, offload_buffers=offload_buffers)
    dispatch(
        model, device_map, main_device=main_device, offload_dir=None if offload_dir is None else Path(offload_dir),
        offload_buffers=offload_buffers, skip_keys=tuple(listed(skip_keys or ())),
        mapped={name: file for name, file in sources.mapped.items() if name in layout.tensors},
        preload_module_classes=present_classes(model, preload_module_classes),
        dtypes={name: dtype for name, dtype in sources.dtypes.items() if name in layout.tensors},
    )  # fmt: skip
    vars(model).pop(DEVICE_MAP, None)
    _show_hooks(model, placements, main_device)
    return model


def _forget(model: nn.Module) -> None:
    """Undo the dispatch of a model, and remove the hooks that it showed to libraries."""
    forget_dispatch(model)
    for module in model.modules():
        if isinstance(hook := hook_of(module), DispatchedHook) and hook.is_shown:
            remove_hook_from_module(module)


def _show_hooks(model: nn.Module, placements: Mapping[str, Placement], main_device: Where | None) -> None:
    """Give the modules of a dispatched model the hooks that libraries look for. These hooks do not run.

    A hook tells the device that computes its module. `_old_forward` is the forward that the dispatch has set.
    """
    devices = {name.rpartition(".")[0]: placement.device for name, placement in placements.items()}
    modules = dict(model.named_modules(remove_duplicate=False))
    first = next(iter(devices.values()), None) if main_device is None else main_device
    for name, device in {**devices, "": first}.items():
        module = modules[name]
        if hook_of(module) is None:
            setattr(module, HOOK, DispatchedHook(device, io_same_device=not name, module=module))
            vars(module).setdefault(OLD_FORWARD, module.forward)


def _cover(
    layout: ModelLayout, device_map: Mapping[str, Where], sources: WeightSources, *, has_folder: bool
) -> dict[str, Where]:
    """Return a map without unknown names, in which tensors without an entry get their present device."""
    names, tensors = {*layout.modules, *layout.tensors}, layout.tensors.items()
    known = {name: device for name, device in device_map.items() if name in names}
    left = {name: tensor.device for name, tensor in tensors if nearest_entry(name, known) is None}
    covering: dict[str, Where] = {**left, **known, **dict.fromkeys(sources.in_memory, "cpu")}
    if not has_folder:
        for name in layout.parameters:
            if name not in sources.mapped and covering[nearest_entry(name, covering) or ""] == "disk":
                on_disk = ", ".join(repr(entry) for entry, place in covering.items() if place == "disk")
                raise ValueError(
                    f"device_map puts {on_disk} on the disk, and {name!r} is in no file yet: name a folder for such "
                    "weights, offload_dir=..."
                )
    if isinstance(device_map, DeviceMap):
        return DeviceMap(covering, window_bytes=device_map.window_bytes)
    return covering


def _fill_from_sources(
    model: nn.Module,
    state_dict: Mapping[str, Tensor] | None,
    offload_dir: Folder | None,
    offload_index: Mapping[str, Entry] | None,
) -> WeightSources:
    """Fill the model's tensors on the meta device with values; return the places of weights on the disk."""
    layout = ModelLayout.of(model)
    remembered = vars(model).pop(_LOADED, None)
    sources = remembered if isinstance(remembered, WeightSources) else WeightSources()
    given = state_dict is not None or offload_index is not None or offload_dir is not None
    if not given or not any(tensor.is_meta for tensor in layout.tensors.values()):
        return sources
    loader = OffloadedWeightsLoader(dict(state_dict or {}), offload_dir, offload_index)
    for names in layout.aliases:
        known = next((name for name in names if name in loader.all_keys), None)
        if known is not None and layout.tensors[known].is_meta:
            value = _value_of(known, names, loader, sources)
            new = LoadTarget(known, layout.tensors[known]).replaced_by(value)
            apply_assignments(model, [Assignment(names, new)])
    return sources


def _value_of(
    known: str, names: tuple[str, ...], loader: OffloadedWeightsLoader, sources: WeightSources
) -> Tensor:
    """Return the values of a tensor; if a file holds them, record the file under all names of the tensor."""
    if known in loader.state_dict:
        return loader.state_dict[known].detach()
    file, stored = loader.file_of(known)
    value = file.tensor(stored)
    wanted = loader.index[known].get("dtype")
    computed = value.dtype if wanted is None else find_dtype(str(wanted))
    sources.mapped.update(dict.fromkeys(names, file))
    if computed != value.dtype:
        sources.dtypes.update(dict.fromkeys(names, computed))
    return value


class DispatchedHook(AlignDevicesHook):
    """The hook on a module of a dispatched model, by which libraries reach weights outside of a forward.

    peft merges adapters so: it calls `pre_forward`, changes the weights, and calls `post_forward`. The dispatch
    handles forwards, so the hook does not run in them. A new hook that a library makes of this class does run.
    """

    def __init__(
        self,
        execution_device: Where | None = None,
        io_same_device: bool = False,
        skip_keys: str | list[str] | None = None,
        module: nn.Module | None = None,
    ) -> None:
        super().__init__(execution_device, io_same_device=io_same_device, skip_keys=skip_keys)
        self._module = None if module is None else ref(module)
        self._stored: dict[str, Tensor] = {}
        self._changed: Mapping[str, Tensor] = {}
        if module is not None:
            self.original_devices = {name: tensor.device for name, tensor in named_module_tensors(module)}

    @property
    def is_shown(self) -> bool:
        """True if the hook belongs to a module of a dispatched model; it does not run in the module's forwards."""
        return self._module is not None

    @property
    def offload(self) -> bool:  # type: ignore[override] so that it is no attribute that a new hook is made with
        """True if the module's weights are stored elsewhere and fetched to the computing device for its forward."""
        module = None if self._module is None else self._module()
        return bool(self._stored) or (
            module is not None and any(map(is_offloaded, _tensors(module).values()))
        )

    @offload.setter
    def offload(self, value: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if value:
            raise ValueError("offload=True: the dispatch of the model says which weights are offloaded")

    @property
    def weights_map(self) -> Mapping[str, Tensor] | None:  # type: ignore[override]
        """The offloaded weights by name, read-only; if new values are set here, `post_forward` stores them."""
        module = None if self._module is None else self._module()
        if module is None or not self.offload:
            return None
        stored = {**_tensors(module), **self._stored}
        return MappingProxyType({name: tensor.detach() for name, tensor in stored.items()})

    @weights_map.setter
    def weights_map(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, value: Mapping[str, Tensor] | None
    ) -> None:
        self._changed = value or {}

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Move the module's offloaded weights to the device that computes, until `post_forward` is called."""
        place = None if self.execution_device is None else place_of(self.execution_device)
        for name, tensor in _tensors(module).items():
            if is_offloaded(tensor) and isinstance(place, torch.device):
                self._stored[name] = tensor
                value = tensor.detach().to(place)
                is_parameter = isinstance(tensor, nn.Parameter)
                put_tensor(module, name, nn.Parameter(value, tensor.requires_grad) if is_parameter else value)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Write changed weights to the place where the weights are stored."""
        present = _tensors(module)
        for name, stored in self._stored.items():
            value = self._changed.get(name, present[name])
            if present[name] is stored:
                continue
            new = value.detach().to(stored.device, stored.dtype)
            with torch.no_grad():
                if not torch.equal(stored.detach(), new):  # pages of a file that are written to take memory
                    stored.detach().copy_(new)
            put_tensor(module, name, stored)
        self._stored, self._changed = {}, {}
        return output


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(named_module_tensors(module))
