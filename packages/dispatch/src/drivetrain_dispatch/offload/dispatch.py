"""Place a model's weights by a device map, and fetch the offloaded ones when they are used."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from weakref import ref

import torch
from torch import nn

from drivetrain_dispatch.model.quantized_tensor import KeptLayout
from drivetrain_dispatch.model.units import Unit, units_of
from drivetrain_dispatch.offload.device_transfer import InputMover
from drivetrain_dispatch.offload.dispatch_plan import DispatchPlan, plan_dispatch
from drivetrain_dispatch.offload.dispatched_model import Dispatched, Removable, mark_dispatched
from drivetrain_dispatch.offload.engine import OffloadEngine
from drivetrain_dispatch.offload.forward_hooks import listen, listen_to_units
from drivetrain_dispatch.offload.immovable import keep_in_place
from drivetrain_dispatch.offload.mapped_weights import MappedWeightsEngine, check_release
from drivetrain_dispatch.offload.relocate import relocate
from drivetrain_dispatch.offload.residency import OffloadedTensor, TensorSlot
from drivetrain_dispatch.offload.transfer import TransferRequest, default_windows
from drivetrain_dispatch.planning.device_map import HOST, Device, DeviceMap, as_others_see_it, place_of
from drivetrain_dispatch.planning.placement import Placement, devices_of_parts
from drivetrain_weights import MappedFile


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, Device],
    *,
    main_device: Device | None = None,
    offload_dir: Path | str | None = None,
    write_back: bool = False,
    release_pages: bool = False,
    offload_buffers: bool = False,
    preload_module_classes: Collection[str] = (),
    skip_keys: Collection[str] = (),
    mapped: Mapping[str, MappedFile] | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> nn.Module:
    """Place each part of a model by a device map, and prefetch offloaded weights while earlier modules compute.

    Modules on `"cpu"` or `"disk"` are computed by the accelerator that the map names before them, or by the host if
    the map names none. The host uses weights on the disk in place, in the mapped pages of their file. After an error
    the model is unchanged.

    Args:
        model: The model with its weights; changed in place.
        device_map: A mapping from names of modules, parameters or buffers to devices; `""` covers the rest.
        main_device: The accelerator for modules that the map names before any; by default the first in the map.
        offload_dir: The folder for weights that are placed on the disk and in no file yet.
        write_back: Whether training changes that file; otherwise changed weights take memory.
        release_pages: Whether pages that the host has used leave this process's memory; the page cache keeps them.
        offload_buffers: Whether buffers are offloaded too.
        preload_module_classes: Names of module classes whose weights are fetched all at once, such as compiled ones.
        skip_keys: Keyword arguments that stay on their device.
        mapped: The files of weights that are mapped pages already, by name.
        dtypes: The compute dtypes of weights stored in another one, by name; running statistics of norms keep theirs.

    Returns:
        The same model. Its attribute `hf_device_map` is the map in the form of `as_others_see_it`.

    Raises:
        DeviceMapError: The map does not fit model or machine, a device has no room, or `offload_dir` is missing.
        WeightFilesError: The weights could not be written to the disk.
        OffloadedError: The model is dispatched already.
        ValueError: The model lacks a named class or tensor, or a dtype is not a `torch.dtype`.
    """
    check_release(release_pages)
    plan = plan_dispatch(
        model, device_map, main_device=main_device, write_back=write_back, offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes, dtypes=dtypes,
    )  # fmt: skip
    files = relocate(plan.layout, plan.placements, mapped or {}, offload_dir, write_back=write_back)
    dispatched = mark_dispatched(model)
    _fetch_at_use(dispatched, model, plan, files, device_map)
    _use_mapped(dispatched, model, plan, files, release_pages=release_pages)
    dispatched.handles += _move_inputs(model, plan.placements, skip_keys)
    _show_map(model, device_map)
    return model


def _fetch_at_use(
    dispatched: Dispatched,
    model: nn.Module,
    plan: DispatchPlan,
    files: Mapping[str, MappedFile],
    device_map: Mapping[str, Device],
) -> None:
    """Have an engine fetch the tensors of a plan whenever their modules are called."""
    if units := plan.fetched_units:
        engine = _offload_engine(model, plan, files, device_map)
        dispatched.engines.append(engine)
        dispatched.handles += listen_to_units(model, [unit.module for unit in units], engine)
        dispatched.handles += _keep_layouts(plan, units)
        dispatched.handles += keep_in_place(plan.layout, [name for unit in units for name in unit.tensors])


def _use_mapped(
    dispatched: Dispatched,
    model: nn.Module,
    plan: DispatchPlan,
    files: Mapping[str, MappedFile],
    *,
    release_pages: bool,
) -> None:
    """Have the host use the tensors that are in files and not fetched in place."""
    fetched = {name for unit in plan.fetched_units for name in unit.tensors}
    if units := units_of(
        plan.layout, [name for name in plan.placements if name in files and name not in fetched]
    ):
        engine = MappedWeightsEngine(units, files, releases=release_pages)
        dispatched.engines.append(engine)
        dispatched.handles += listen(model, engine)
        dispatched.handles += _keep_layouts(plan, units)


def _offload_engine(
    model: nn.Module,
    plan: DispatchPlan,
    files: Mapping[str, MappedFile],
    device_map: Mapping[str, Device],
) -> OffloadEngine:
    """Return the engine that fetches the tensors of a plan from where they are stored by now."""
    slots = _slots_of_tensors(model)
    offloaded: dict[int, OffloadedTensor] = {}
    for unit in plan.fetched_units:
        for name, tensor in unit.tensors.items():
            if id(tensor) not in offloaded:
                # Detached, it has the tensor's version counter: each shows what is written to the other.
                quantized = name in plan.layout.quantized
                stored = tensor if quantized else tensor.detach()
                dtype = plan.compute_dtypes.get(name, tensor.dtype)
                request = TransferRequest.of(stored, plan.placements[name].device, dtype)
                offloaded[id(tensor)] = OffloadedTensor(
                    tensor, request, slots[id(tensor)], quantized=quantized
                )
    units = [
        list(dict.fromkeys(offloaded[id(tensor)] for tensor in unit.tensors.values()))
        for unit in plan.fetched_units
    ]
    names = [unit.name for unit in plan.fetched_units]
    fetched = [name for unit in plan.fetched_units for name in unit.tensors]
    return OffloadEngine(
        units,
        names=names,
        window_bytes=_windows(device_map, names, units),
        files=list(dict.fromkeys(files[name] for name in fetched if name in files)),
    )


def _slots_of_tensors(model: nn.Module) -> dict[int, list[TensorSlot]]:
    """Return the modules that hold each parameter and buffer, by the tensor's id."""
    slots: dict[int, list[TensorSlot]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            slots.setdefault(id(parameter), []).append(TensorSlot(ref(module), name, is_buffer=False))
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            slots.setdefault(id(buffer), []).append(TensorSlot(ref(module), name, is_buffer=True))
    return slots


def _windows(
    device_map: Mapping[str, Device], names: Sequence[str], units: Sequence[Sequence[OffloadedTensor]]
) -> dict[torch.device, int]:
    """Return the transfer window in bytes of each device that computes: the map's, or else the default."""
    windows = default_windows(
        [
            (name, unit[0].request.device, sum(tensor.request.device_bytes for tensor in unit))
            for name, unit in zip(names, units, strict=True)
        ]
    )
    planned = device_map.window_bytes if isinstance(device_map, DeviceMap) else {}
    for device, size_bytes in planned.items():
        place = place_of(device)
        if isinstance(place, torch.device) and place in windows:
            windows[place] = size_bytes
    return windows


def _keep_layouts(plan: DispatchPlan, units: Iterable[Unit]) -> list[Removable]:
    """Stop the layers of quantised weights from changing them."""
    return [KeptLayout(unit.module) for unit in units if not plan.layout.quantized.isdisjoint(unit.tensors)]


def _move_inputs(
    model: nn.Module, placements: Mapping[str, Placement], skip_keys: Collection[str]
) -> list[Removable]:
    """Move inputs to the device that computes: those of the model, and of each module on another device."""
    if all(placement.device == HOST for placement in placements.values()):
        return []
    modules = dict(model.named_modules())
    handles: list[Removable] = []
    for name, device in devices_of_parts(modules, placements).items():
        handles += InputMover(device, skip_keys, returns=name == "").attach(modules[name])
    return handles


def _show_map(model: nn.Module, device_map: Mapping[str, Device]) -> None:
    """Set `hf_device_map`, which transformers and other libraries read.

    Encoder-decoders get none: their `generate` would look for Accelerate's hooks (transformers 5.23).
    """
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        model.hf_device_map = as_others_see_it(device_map)  # type: ignore[assignment] no module
