"""Place a model's weights by a device map, and fetch the offloaded ones when they are used."""

from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from weakref import ref

import torch
from torch import Tensor, nn

from drivetrain_dispatch.arguments import check_dtype
from drivetrain_dispatch.errors import DeviceMapError, OffloadedError
from drivetrain_dispatch.model.bitsandbytes import KeptLayout, take_back
from drivetrain_dispatch.model.model_layout import ModelLayout
from drivetrain_dispatch.model.tensor_subclass import is_packed, takes, why_unready
from drivetrain_dispatch.model.units import Unit, check_devices, units_of
from drivetrain_dispatch.offload.device_transfer import Moving
from drivetrain_dispatch.offload.engine import Streaming
from drivetrain_dispatch.offload.forward_hooks import Around, Listener, NotCopied, check_removable, listen
from drivetrain_dispatch.offload.immovable import keep_in_place
from drivetrain_dispatch.offload.mapped_weights import InPlace, check_release
from drivetrain_dispatch.offload.parameter import is_away
from drivetrain_dispatch.offload.relocate import settle
from drivetrain_dispatch.offload.residency import OffloadStats, Owner, Seat
from drivetrain_dispatch.offload.trace import OffloadTrace
from drivetrain_dispatch.offload.transfer import Parcel
from drivetrain_dispatch.offload.transfer_window import usual_windows
from drivetrain_dispatch.planning.device_map import (
    Device,
    DeviceMap,
    as_others_see_it,
    check_places,
    place_of,
)
from drivetrain_dispatch.planning.placement import (
    Placement,
    devices_of_parts,
    placements_of,
)
from drivetrain_weights import MappedFile

_CPU = torch.device("cpu")
_RECORD = "_drivetrain_dispatch"  # the name of the model's attribute


class _Handle(Protocol):
    def remove(self) -> None: ...


class _Engine(Listener, Protocol):
    def busy(self) -> bool: ...

    def close(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class _Dispatch(NotCopied):
    """The engines and handles of a dispatched model."""

    engines: list[_Engine] = field(default_factory=list[_Engine])
    handles: list[_Handle] = field(default_factory=list[_Handle])

    def listen(self, model: nn.Module, units: Sequence[Unit], engine: _Engine) -> None:
        """Call an engine when its units are used; one that uses weights in place registers its own hooks."""
        self.engines.append(engine)
        brings = isinstance(engine, Streaming)
        self.handles.extend(listen(model, [unit.module for unit in units] if brings else [], engine))
        for unit in units:
            if any(map(is_packed, unit.tensors.values())):
                self.handles.append(KeptLayout(unit.module))
        if brings:
            self.handles += keep_in_place(model, [name for unit in units for name in unit.tensors])

    def move(self, model: nn.Module, placements: Mapping[str, Placement], skip_keys: Collection[str]) -> None:
        """Move inputs to the device that computes: those of the model, and of each module on another device."""
        devices = {placement.device for placement in placements.values()}
        if devices <= {_CPU}:
            return
        modules = dict(model.named_modules())
        for name, device in devices_of_parts(modules, placements).items():
            outermost = name == ""
            moving = Moving(device, skip_keys, returns=outermost)
            self.handles.extend(moving.attach(modules[name]))


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
    layout = ModelLayout.of(model)
    placements = placements_of(layout, device_map, main_device=main_device, offload_buffers=offload_buffers)
    _check_use(layout.tensors, placements, dtypes or {}, write_back=write_back, release_pages=release_pages)
    take_back(model)
    check_dispatchable(model, layout.tensors, placements)
    wanted = _converted(layout, dtypes or {})
    coming = units_of(layout, _coming(placements, wanted), whole=preload_module_classes)
    check_devices(coming, {name: placement.device for name, placement in placements.items()})
    files = settle(layout.tensors, placements, mapped or {}, offload_dir, write_back=write_back)
    record = _Dispatch()
    setattr(model, _RECORD, record)
    if coming:
        record.listen(model, coming, _streaming(model, coming, placements, wanted, files, device_map))
    if in_place := units_of(layout, _in_place(placements, files, coming)):
        record.listen(model, in_place, InPlace(in_place, files, releases=release_pages))
    record.move(model, placements, skip_keys)
    _show_map(model, device_map)
    return model


def _show_map(model: nn.Module, device_map: Mapping[str, Device]) -> None:
    """Set `hf_device_map`, which transformers and other libraries read.

    Encoder-decoders get none: their `generate` would look for Accelerate's hooks (transformers 5.23).
    """
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        model.hf_device_map = as_others_see_it(device_map)  # type: ignore[assignment] no module


def remove_hooks(model: nn.Module) -> nn.Module:
    """Make a dispatched model an ordinary one again.

    Remove its hooks, and make its weights ordinary tensors with their current values: offloaded weights on the host,
    weights on the disk as mapped pages of their file, the others on their device. A model that is not dispatched is
    unchanged.

    Raises:
        OffloadedError: A forward is running, or the forward, `encode` or `decode` of a module was replaced after the
            dispatch. The model is unchanged.
    """
    record: _Dispatch | None = model.__dict__.get(_RECORD)
    if record is not None:
        if any(engine.busy() for engine in record.engines):
            raise OffloadedError(
                "a forward of the model is under way: call remove_hooks(model) when it is over"
            )
        check_removable([handle for handle in record.handles if isinstance(handle, Around)])
        for handle in reversed(record.handles):
            handle.remove()
        for engine in record.engines:
            engine.close()
        model.__dict__.pop("hf_device_map", None)  # other libraries may have deleted it
        delattr(model, _RECORD)
    return model


def dispatched(model: nn.Module) -> bool:
    """Return whether a model is dispatched."""
    return _RECORD in model.__dict__


def offload_stats(model: nn.Module) -> OffloadStats:
    """Return how many bytes the forwards of a dispatched model have fetched, and how often they stalled.

    Raises:
        OffloadedError: The model is not dispatched.
    """
    each = [engine.stats for engine in _streams(model)]
    return OffloadStats(
        num_used=sum(stats.num_used for stats in each),
        num_missed=sum(stats.num_missed for stats in each),
        bytes_brought=sum(stats.bytes_brought for stats in each),
    )


@contextmanager
def trace_offload(model: nn.Module) -> Generator[OffloadTrace]:
    """Run the block with a trace of a dispatched model: when each unit was fetched, waited for and computed.

    Weights that the host uses in place are not fetched, and so not traced.

    Raises:
        OffloadedError: The model is not dispatched.
    """
    trace = OffloadTrace()
    engines = _streams(model)
    for engine in engines:
        engine.trace = trace
    try:
        yield trace
    finally:
        for engine in engines:
            engine.trace = None


def _streams(model: nn.Module) -> list[Streaming]:
    record: _Dispatch | None = model.__dict__.get(_RECORD)
    if record is None:
        raise OffloadedError("the model is not dispatched: nothing is fetched for it")
    return [engine for engine in record.engines if isinstance(engine, Streaming)]


def _check_use(
    tensors: Mapping[str, Tensor],
    placements: Mapping[str, Placement],
    dtypes: Mapping[str, torch.dtype],
    *,
    write_back: bool,
    release_pages: bool,
) -> None:
    """Check the arguments for single tensors and for weights on the disk.

    Raises:
        DeviceMapError: No weight is on the disk to be written back, or the system cannot release pages.
        ValueError: The model has no such tensor, or a dtype is not a `torch.dtype`.
    """
    check_release(release_pages)
    if unknown := sorted(dtypes.keys() - tensors.keys()):
        raise ValueError(
            f"dtypes={unknown}: the model has no such parameter or buffer; see named_parameters()"
        )
    for name, dtype in dtypes.items():
        check_dtype(f"dtypes[{name!r}]", dtype)
    if write_back and all(placement.home != "disk" for placement in placements.values()):
        raise DeviceMapError(
            "write_back=True: device_map puts nothing on 'disk' that training could change; leave it out, or put "
            "weights there"
        )


def check_dispatchable(
    model: nn.Module, tensors: Mapping[str, Tensor], placements: Mapping[str, Placement]
) -> None:
    """Check all that can be checked before any tensor is moved.

    Raises:
        OffloadedError: The model or a part of it is dispatched already.
        DeviceMapError: The machine lacks a device, or a tensor has no data or was made in inference mode.
    """
    if dispatched(model):
        raise OffloadedError(
            "the model is dispatched already: call remove_hooks(model) before it is dispatched anew"
        )
    for name, module in model.named_modules():
        if dispatched(module):
            raise OffloadedError(
                f"{name!r} of the model is dispatched already: call remove_hooks on it first"
            )
    for name, tensor in tensors.items():
        if is_away(tensor):
            raise OffloadedError(
                f"{name!r} belongs to another model that is dispatched: call remove_hooks on that one first"
            )
        if tensor.is_inference():
            raise DeviceMapError(
                f"{name!r} was made in torch.inference_mode, where nothing tells when a tensor is written to: build "
                "and load the model outside of it"
            )
        if is_packed(tensor) and not tensor.is_meta and (reason := why_unready(tensor)):
            raise DeviceMapError(
                f"{name!r} is a quantised weight that {reason}: quantise it and freeze it before the model is "
                "dispatched, or load it with load_checkpoint_and_dispatch(quantization=...)"
            )
    check_places([place for placement in placements.values() for place in placement])
    for name, tensor in tensors.items():
        device = placements[name].device
        comes = not (isinstance(tensor, nn.Parameter) or placements[name].stays or tensor.is_meta)
        if comes and not takes(torch.empty(0), torch.empty(0, device=device)):
            raise DeviceMapError(
                f"{name!r} is a buffer, and torch cannot give one of the host a value on {device}: leave buffers on "
                "the device, without offload_buffers"
            )
    if empty := [name for name, tensor in tensors.items() if tensor.is_meta]:
        more = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        raise DeviceMapError(
            f"{empty[0]!r}{more} on the meta device: load weights first, or with load_checkpoint_and_dispatch at once"
        )


def _converted(layout: ModelLayout, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
    """Return the dtypes of the tensors that are converted at use, by name.

    Running statistics, which norms write to in a forward, are not: nothing tells that they were written to.
    """
    for name, dtype in dtypes.items():
        if is_packed(layout.tensors[name]) and dtype != layout.tensors[name].dtype:
            raise DeviceMapError(
                f"dtypes[{name!r}]={dtype}: it is a quantised weight, which says by itself what it is computed in"
            )
    return {name: dtype for name, dtype in dtypes.items() if name not in layout.running_statistics}


def _windows(
    device_map: Mapping[str, Device], units: Sequence[Unit], seats: Sequence[Sequence[Seat]]
) -> dict[torch.device, int]:
    """Return the transfer window in bytes of each device that computes: the map's, or else the default."""
    windows = usual_windows(
        [
            (unit.name, each[0].parcel.device, sum(seat.room_bytes for seat in each))
            for unit, each in zip(units, seats, strict=True)
        ]
    )
    said = device_map.window_bytes if isinstance(device_map, DeviceMap) else {}
    for device, size_bytes in said.items():
        place = place_of(device)
        if isinstance(place, torch.device) and place in windows:
            windows[place] = size_bytes
    return windows


def _coming(placements: Mapping[str, Placement], dtypes: Mapping[str, torch.dtype]) -> list[str]:
    """Return the names of the tensors that are fetched at use."""
    return [
        name
        for name, placement in placements.items()
        if name in dtypes or not (placement.stays or placement.device == _CPU)
    ]


def _in_place(
    placements: Mapping[str, Placement], files: Mapping[str, MappedFile], coming: Sequence[Unit]
) -> list[str]:
    """Return the names of the tensors that the host uses in place, in their file."""
    brought = {name for unit in coming for name in unit.tensors}
    return [name for name in placements if name in files and name not in brought]


def _streaming(
    model: nn.Module,
    units: Sequence[Unit],
    placements: Mapping[str, Placement],
    dtypes: Mapping[str, torch.dtype],
    files: Mapping[str, MappedFile],
    device_map: Mapping[str, Device],
) -> Streaming:
    owners: dict[int, list[Owner]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append(Owner(ref(module), name))
    seats: dict[int, Seat] = {}
    for unit in units:
        for name, tensor in unit.tensors.items():
            if id(tensor) not in seats:
                home = tensor if is_packed(tensor) else tensor.data
                parcel = Parcel.of(home, placements[name].device, dtypes.get(name, tensor.dtype))
                seats[id(tensor)] = Seat(tensor, parcel, owners.get(id(tensor), ()))
    each = [list(dict.fromkeys(seats[id(tensor)] for tensor in unit.tensors.values())) for unit in units]
    return Streaming(
        each,
        names=[unit.name for unit in units],
        window_bytes=_windows(device_map, units, each),
        files=_files_of(units, files),
    )


def _files_of(units: Sequence[Unit], files: Mapping[str, MappedFile]) -> list[MappedFile]:
    return list(dict.fromkeys(files[name] for unit in units for name in unit.tensors if name in files))
