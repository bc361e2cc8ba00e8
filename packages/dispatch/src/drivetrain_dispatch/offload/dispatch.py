"""Plan where the weights of a model go by a device map, move them there, and fetch offloaded ones at use."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import ref

import torch
from torch import nn

from drivetrain_dispatch.arguments import check_dtype
from drivetrain_dispatch.compat import BUFFERS, PARAMETERS
from drivetrain_dispatch.errors import DeviceMapError, OffloadedError
from drivetrain_dispatch.model.model_layout import ModelLayout
from drivetrain_dispatch.model.quantized_tensor import KeptLayout, why_unready
from drivetrain_dispatch.model.units import Unit, check_devices, units_of
from drivetrain_dispatch.offload.device_transfer import InputMover
from drivetrain_dispatch.offload.dispatched_model import (
    check_has_weights,
    check_not_dispatched,
    mark_dispatched,
)
from drivetrain_dispatch.offload.engine import OffloadEngine
from drivetrain_dispatch.offload.forward_hooks import listen, listen_to_units
from drivetrain_dispatch.offload.mapped_weights import MappedWeightsEngine, check_release
from drivetrain_dispatch.offload.parameter import is_offloaded, keep_in_place
from drivetrain_dispatch.offload.relocate import relocate
from drivetrain_dispatch.offload.residency import OffloadedTensor, TensorSlot
from drivetrain_dispatch.offload.transfer import TransferRequest, default_windows
from drivetrain_dispatch.planning.device_map import HOST, Device, DeviceMap, as_others_see_it, place_of
from drivetrain_dispatch.planning.placement import Placement, check_places, devices_of_parts, placements_of
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

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> dispatch_model(model, {"0": "cpu", "1": "cpu"})(torch.ones(1, 4)).shape
        torch.Size([1, 2])
    """
    check_release(release_pages)
    plan = plan_dispatch(
        model, device_map, main_device=main_device, write_back=write_back, offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes, dtypes=dtypes,
    )  # fmt: skip
    files = relocate(plan.layout, plan.placements, mapped or {}, offload_dir, write_back=write_back)
    dispatched = mark_dispatched(model)
    units = plan.fetched_units
    if units:
        engine = _offload_engine(plan, files, device_map)
        dispatched.engines.append(engine)
        dispatched.handles += listen_to_units(model, [unit.module for unit in units], engine)
        dispatched.handles += keep_in_place(plan.layout, plan.fetched)
    # The host uses tensors in files in place, unless they are converted.
    if in_place := units_of(plan.layout, files.keys() - set(plan.fetched)):
        engine = MappedWeightsEngine(in_place, files, releases=release_pages)
        dispatched.engines.append(engine)
        dispatched.handles += listen(model, engine)
    quantized = plan.layout.quantized
    dispatched.handles += [
        KeptLayout(unit.module) for unit in [*units, *in_place] if not quantized.isdisjoint(unit.tensors)
    ]
    if any(placement.device != HOST for placement in plan.placements.values()):
        # Inputs go to the device that computes: those of the model, and of each module on another device.
        modules = dict(model.named_modules())
        for name, device in devices_of_parts(modules, plan.placements).items():
            dispatched.handles += InputMover(device, skip_keys, returns=name == "").attach(modules[name])
    # Other libraries read the map. For encoder-decoders, `generate` would look for Accelerate's hooks then
    # (transformers 5.23).
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        model.hf_device_map = as_others_see_it(device_map)  # type: ignore[assignment] no module
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchPlan:
    """A decision where each tensor of a model is stored and computed, and which are fetched."""

    layout: ModelLayout
    placements: Mapping[str, Placement]
    compute_dtypes: Mapping[str, torch.dtype]
    fetched: Sequence[str]
    fetched_units: Sequence[Unit]


def plan_dispatch(
    model: nn.Module,
    device_map: Mapping[str, Device],
    *,
    main_device: Device | None = None,
    write_back: bool = False,
    offload_buffers: bool = False,
    preload_module_classes: Collection[str] = (),
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> DispatchPlan:
    """Return the plan of a dispatch, after all checks that need no tensor to be moved; see `dispatch_model`."""
    layout, given = ModelLayout.of(model), dtypes or {}
    placements = placements_of(layout, device_map, main_device=main_device, offload_buffers=offload_buffers)
    if unknown := sorted(given.keys() - layout.tensors.keys()):
        raise ValueError(
            f"dtypes={unknown}: the model has no such parameter or buffer; see named_parameters()"
        )
    for name, dtype in given.items():
        check_dtype(f"dtypes[{name!r}]", dtype)
        if name in layout.quantized and dtype != layout.tensors[name].dtype:
            raise DeviceMapError(
                f"dtypes[{name!r}]={dtype}: it is a quantised weight, which says by itself what it is computed in"
            )
    if write_back and not any(placement.on_disk for placement in placements.values()):
        raise DeviceMapError(
            "write_back=True: device_map puts nothing on 'disk' that training could change; leave it out, or put "
            "weights there"
        )
    check_dispatchable(layout, placements)
    # Norms write to running statistics in a forward, and nothing tells so: these keep their dtype.
    compute_dtypes = {name: dtype for name, dtype in given.items() if name not in layout.running_statistics}
    fetched = [
        name for name, placement in placements.items() if name in compute_dtypes or placement.is_fetched
    ]
    units = units_of(layout, fetched, whole=preload_module_classes)
    check_devices(units, {name: placement.device for name, placement in placements.items()})
    return DispatchPlan(
        layout=layout,
        placements=placements,
        compute_dtypes=compute_dtypes,
        fetched=fetched,
        fetched_units=units,
    )


def check_dispatchable(layout: ModelLayout, placements: Mapping[str, Placement]) -> None:
    """Check all of a model that can be checked before any tensor is moved."""
    check_not_dispatched(layout.model)
    check_has_weights(layout.tensors.items())
    for name, tensor in layout.tensors.items():
        if is_offloaded(tensor):
            raise OffloadedError(
                f"{name!r} belongs to another model that is dispatched: call remove_hooks on that one first"
            )
        if tensor.is_inference():
            raise DeviceMapError(
                f"{name!r} was made in torch.inference_mode, where nothing tells when a tensor is written to: build "
                "and load the model outside of it"
            )
        layer = layout.modules[name.rpartition(".")[0]]
        if name in layout.quantized and (reason := why_unready(tensor, layer)):
            raise DeviceMapError(
                f"{name!r} is a quantised weight that {reason}: quantise it and freeze it before the model is "
                "dispatched, or load it with load_checkpoint_and_dispatch(quantization=...)"
            )
    check_places([place for placement in placements.values() for place in placement])


def _offload_engine(
    plan: DispatchPlan, files: Mapping[str, MappedFile], device_map: Mapping[str, Device]
) -> OffloadEngine:
    """Return the engine that fetches the tensors of a plan from where they are stored by now."""
    slots = defaultdict[int, list[TensorSlot]](list)  # the modules that hold each tensor, by its id
    for module in plan.layout.model.modules():
        for attribute in (PARAMETERS, BUFFERS):
            for name, tensor in vars(module)[attribute].items():
                slots[id(tensor)].append(TensorSlot(ref(module), name, is_buffer=attribute == BUFFERS))
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
    return OffloadEngine(
        units,
        names=names,
        window_bytes=windows,
        files=list(dict.fromkeys(files[name] for name in plan.fetched if name in files)),
    )
