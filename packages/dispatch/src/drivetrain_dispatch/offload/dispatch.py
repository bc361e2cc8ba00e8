"""Dispatch a model by a device map, read its counts and traces, and make it ordinary again."""

from collections import defaultdict
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol
from weakref import ref

import torch
from torch import nn

from drivetrain_dispatch.arguments import check_dtype
from drivetrain_dispatch.compat import BUFFERS, PARAMETERS
from drivetrain_dispatch.errors import DeviceMapError, OffloadedError
from drivetrain_dispatch.model.model_layout import ModelLayout, Unit, check_devices, units_of
from drivetrain_dispatch.model.quantized_tensor import KeptLayout, why_unready
from drivetrain_dispatch.offload.device_transfer import InputMover
from drivetrain_dispatch.offload.engine import OffloadEngine
from drivetrain_dispatch.offload.forward_hooks import (
    MethodWrapper,
    NotCopied,
    check_removable,
    listen,
    listen_to_units,
)
from drivetrain_dispatch.offload.mapped_weights import MappedWeightsEngine, check_release
from drivetrain_dispatch.offload.parameter import is_offloaded, keep_in_place
from drivetrain_dispatch.offload.relocate import relocate
from drivetrain_dispatch.offload.residency import (
    OffloadedTensor,
    OffloadStats,
    Residency,
    TensorSlot,
    default_windows,
)
from drivetrain_dispatch.offload.trace import OffloadTrace
from drivetrain_dispatch.offload.transfer import TransferRequest
from drivetrain_dispatch.planning.device_map import (
    HOST,
    Device,
    DeviceMap,
    Placement,
    as_others_see_it,
    check_places,
    devices_of_parts,
    place_of,
    placements_of,
)
from drivetrain_messages import list_some
from drivetrain_weights import MappedFile

_ATTRIBUTE = "_drivetrain_dispatch"  # the name of a dispatched model's attribute


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

    A module on `"cpu"` or `"disk"` is computed by the accelerator named before it, or in a map without accelerators
    by the host. The host uses weights on the disk in place, in the mapped pages of their file. After an error the
    model is unchanged.

    Args:
        model: The model with its weights; changed in place.
        device_map: A mapping from names of modules, parameters or buffers to devices; `""` covers the rest.
        main_device: The accelerator for modules before the first accelerator in the map; by default that accelerator.
        offload_dir: The folder for weights that the map places on the disk and that are not in a file yet.
        write_back: Whether training changes the files in `offload_dir`; otherwise changed weights take memory.
        release_pages: Whether pages leave this process's memory, but not the page cache, after the host used them.
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
    layout = ModelLayout.of(model, at_once=preload_module_classes)
    placements = placements_of(layout, device_map, main_device=main_device, offload_buffers=offload_buffers)
    plan = plan_dispatch(layout, placements, mapped=mapped or {}, dtypes=dtypes or {}, write_back=write_back)
    return carry_out(plan, device_map, offload_dir, release_pages=release_pages, skip_keys=skip_keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchPlan:
    """A plan of where each tensor is stored and computed, and of which tensors are fetched or used in their file."""

    layout: ModelLayout
    placements: Mapping[str, Placement]
    compute_dtypes: Mapping[str, torch.dtype]
    mapped: Mapping[str, MappedFile]
    write_back: bool
    fetched: Collection[str]
    fetched_units: Sequence[Unit]
    units_in_place: Sequence[Unit]  # the units whose tensors the host uses in the pages of their files


def plan_dispatch(
    layout: ModelLayout,
    placements: Mapping[str, Placement],
    *,
    mapped: Mapping[str, MappedFile],
    dtypes: Mapping[str, torch.dtype],
    write_back: bool = False,
) -> DispatchPlan:
    """Return the plan of a dispatch, after all checks that move no tensor; see `dispatch_model`."""
    tensors = layout.tensors
    if unknown := sorted(dtypes.keys() - tensors.keys()):
        raise ValueError(
            f"dtypes={unknown}: the model has no such parameter or buffer; see named_parameters()"
        )
    for name, dtype in dtypes.items():
        check_dtype(f"dtypes[{name!r}]", dtype)
        if name in layout.quantized and dtype != tensors[name].dtype:
            raise DeviceMapError(
                f"dtypes[{name!r}]={dtype}: a quantised weight has a compute dtype of its own; leave the entry out"
            )
    if write_back and not any(placement.on_disk for placement in placements.values()):
        raise DeviceMapError(
            "write_back=True: device_map puts nothing on 'disk' that training could change; leave it out, or put "
            "weights there"
        )
    check_dispatchable(layout, placements)
    # Norms write to running statistics in a forward, and nothing tells so: these keep their dtype.
    compute_dtypes = {name: dtype for name, dtype in dtypes.items() if name not in layout.running_statistics}
    fetched = {
        name: placement.device
        for name, placement in placements.items()
        if name in compute_dtypes or placement.is_fetched
    }
    # The host uses tensors in files in place, unless they are converted. An empty tensor is in no file.
    in_files = {id(tensors[name]) for name in mapped}
    in_files.update(
        id(tensor) for name, tensor in tensors.items() if placements[name].on_disk and tensor.numel()
    )
    in_place = [
        name
        for name, tensor in tensors.items()
        if id(tensor) in in_files and name not in fetched and placements[name].device == HOST
    ]
    fetched_units = units_of(layout, fetched)
    check_devices(fetched_units, fetched)
    return DispatchPlan(
        layout=layout, placements=placements, compute_dtypes=compute_dtypes, mapped=mapped, write_back=write_back,
        fetched=fetched.keys(), fetched_units=fetched_units, units_in_place=units_of(layout, in_place),
    )  # fmt: skip


def check_dispatchable(layout: ModelLayout, placements: Mapping[str, Placement]) -> None:
    """Check that a model can be dispatched, as far as possible before any tensor is moved."""
    check_not_dispatched(layout.model)
    check_has_weights(layout)
    for name, tensor in layout.tensors.items():
        if is_offloaded(tensor):
            raise OffloadedError(
                f"{name!r} belongs to another model that is dispatched: call remove_hooks on that model first"
            )
        if tensor.is_inference():
            raise DeviceMapError(
                f"{name!r} was made in torch.inference_mode, where torch does not count writes to a tensor: build "
                "and load the model outside of it"
            )
        layer = layout.modules[name.rpartition(".")[0]]
        if name in layout.quantized and (reason := why_unready(tensor, layer)):
            raise DeviceMapError(
                f"{name!r} is a quantised weight that {reason}: quantise it and freeze it before the model is "
                "dispatched, or load it with load_checkpoint_and_dispatch(quantization=...)"
            )
    check_places([place for placement in placements.values() for place in placement])


class Removable(Protocol):
    """A handle of a change to a model."""

    def remove(self) -> None:
        """Undo the change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched(NotCopied):
    """The engines of a dispatched model, and the handles to remove in reverse order."""

    offload: OffloadEngine | None
    mapped: MappedWeightsEngine | None
    handles: Sequence[Removable]


def carry_out(
    plan: DispatchPlan,
    device_map: Mapping[str, Device],
    offload_dir: Path | str | None,
    *,
    release_pages: bool,
    skip_keys: Collection[str],
) -> nn.Module:
    """Carry out a plan, and return its model; see `dispatch_model`."""
    layout, placements, model = plan.layout, plan.placements, plan.layout.model
    in_place = plan.units_in_place
    files = relocate(layout, placements, plan.mapped, offload_dir, write_back=plan.write_back)
    handles: list[Removable] = [
        KeptLayout(unit.module)
        for unit in [*plan.fetched_units, *in_place]
        if not layout.quantized.isdisjoint(unit.tensors)
    ]
    offload = _offload_engine(plan, files, device_map) if plan.fetched_units else None
    mapped = MappedWeightsEngine(in_place, files, releases=release_pages) if in_place else None
    if offload is not None:
        handles += listen_to_units(model, [unit.module for unit in plan.fetched_units], offload)
    if mapped is not None:
        handles += listen(model, mapped)
    handles += keep_in_place(layout, plan.fetched)
    if any(placement.device != HOST for placement in placements.values()):
        # Inputs go to the device that computes: those of the model, and of each module on another device.
        modules = dict(model.named_modules())
        for name, device in devices_of_parts(modules, placements).items():
            handles += InputMover(device, skip_keys, returns=name == "").attach(modules[name])
    setattr(model, _ATTRIBUTE, Dispatched(offload=offload, mapped=mapped, handles=handles))
    # Other libraries read the map. For encoder-decoders, `generate` would look for Accelerate's hooks then
    # (transformers 5.23).
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        model.hf_device_map = as_others_see_it(device_map)  # type: ignore[assignment] no module
    return model


def _offload_engine(
    plan: DispatchPlan, files: Mapping[str, MappedFile], device_map: Mapping[str, Device]
) -> OffloadEngine:
    """Return the engine that fetches the tensors of a plan, after they were moved to their storage."""
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
    windows = default_windows(names, units)
    planned = device_map.window_bytes if isinstance(device_map, DeviceMap) else {}
    for device, size_bytes in planned.items():
        place = place_of(device)
        if isinstance(place, torch.device) and place in windows:
            windows[place] = size_bytes
    residency = Residency(windows)
    read = list(dict.fromkeys(files[name] for name in plan.fetched if name in files))
    return OffloadEngine(units, residency, names=names, files=read)


def is_dispatched(model: nn.Module) -> bool:
    """Return whether a model is dispatched."""
    return _ATTRIBUTE in model.__dict__


def check_not_dispatched(model: nn.Module) -> None:
    """Check that neither a model nor a part of it is dispatched."""
    for name, module in model.named_modules():
        if is_dispatched(module):
            whose = f"{name!r} of the model" if name else "the model"
            raise OffloadedError(
                f"{whose} is dispatched already: call remove_hooks(model) on it before it is dispatched anew"
            )


def check_has_weights(layout: ModelLayout) -> None:
    """Check that all tensors of a model have values."""
    if empty := [name for name, tensor in layout.tensors.items() if tensor.is_meta]:
        raise DeviceMapError(
            f"{list_some(map(repr, empty), most=1)} on the meta device: load weights first, with "
            "load_checkpoint_in_model, or with load_checkpoint_and_dispatch at once"
        )


def remove_hooks(model: nn.Module) -> nn.Module:
    """Make a dispatched model an ordinary one again.

    Remove its hooks, and make its weights ordinary tensors with their current values: offloaded weights on the host,
    weights on the disk as mapped pages of their file, other weights on their device. A model that is not dispatched
    is unchanged.

    Raises:
        OffloadedError: A forward is running, or the forward, `encode` or `decode` of a module was replaced after the
            dispatch. The model is unchanged.

    Example:
        >>> import torch
        >>> from drivetrain_dispatch import dispatch_model
        >>> model = dispatch_model(torch.nn.Linear(4, 2), {"": "cpu"})
        >>> type(remove_hooks(model))
        <class 'torch.nn.modules.linear.Linear'>
    """
    dispatched: Dispatched | None = model.__dict__.get(_ATTRIBUTE)
    if dispatched is not None:
        engines = [engine for engine in (dispatched.offload, dispatched.mapped) if engine is not None]
        if any(engine.is_busy() for engine in engines):
            raise OffloadedError(
                "a forward of the model is under way: call remove_hooks(model) when it is over"
            )
        check_removable([handle for handle in dispatched.handles if isinstance(handle, MethodWrapper)])
        for handle in reversed(dispatched.handles):
            handle.remove()
        for engine in engines:
            engine.close()
        model.__dict__.pop("hf_device_map", None)  # other libraries may have deleted it
        delattr(model, _ATTRIBUTE)
    return model


def offload_stats(model: nn.Module) -> OffloadStats:
    """Return how many bytes the forwards of a dispatched model have fetched, and how often they stalled.

    Raises:
        OffloadedError: The model is not dispatched.
    """
    engine = _engine_of(model)
    return OffloadStats() if engine is None else replace(engine.stats)


@contextmanager
def trace_offload(model: nn.Module) -> Generator[OffloadTrace]:
    """Run the block with a trace of a dispatched model: when each unit was fetched, waited for and computed.

    Weights that the host uses in place are neither fetched nor traced.

    Raises:
        OffloadedError: The model is not dispatched.
    """
    trace = OffloadTrace()
    engine = _engine_of(model)
    if engine is not None:
        engine.trace = trace
    try:
        yield trace
    finally:
        if engine is not None:
            engine.trace = None


def _engine_of(model: nn.Module) -> OffloadEngine | None:
    """Return the engine that fetches weights of a dispatched model; None if all stay where they are used."""
    dispatched: Dispatched | None = model.__dict__.get(_ATTRIBUTE)
    if dispatched is None:
        raise OffloadedError("the model is not dispatched: nothing is fetched for it")
    return dispatched.offload
