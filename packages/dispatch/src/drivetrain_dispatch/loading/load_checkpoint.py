"""Load a checkpoint into a model: plan and check, then read, and change the model only at the end."""

from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, TypedDict, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain_dispatch.errors import WeightFilesError
from drivetrain_dispatch.loading.arguments import check_load
from drivetrain_dispatch.loading.assign import Assignment, apply_changes, changes_of
from drivetrain_dispatch.loading.conversion import (
    check_folder,
    convert,
    with_computed_in_memory,
    write_converted,
)
from drivetrain_dispatch.loading.keep_stored_fp8 import StoredPacking, without_parts
from drivetrain_dispatch.loading.load_plan import LoadPlan, plan_load, present_places
from drivetrain_dispatch.loading.quantize_on_load import Packing, refuse_to_save
from drivetrain_dispatch.loading.rank0_broadcast import Relay
from drivetrain_dispatch.loading.state_dict_diff import Stored
from drivetrain_dispatch.loading.tensor_reader import (
    Progress,
    WholeProgress,
    allocate,
    check_copies,
    fill,
    pieces_of,
)
from drivetrain_dispatch.loading.weight_source import WeightSource
from drivetrain_dispatch.planning.device_map import Device, check_places, places_of_tensors
from drivetrain_dispatch.planning.placement import placements_of
from drivetrain_dispatch.quantization.protocol import Quantization, StoredFP8
from drivetrain_weights import MappedFile, open_weights
from drivetrain_weights.tensor_box import is_dtensor

ReadBy = Literal["each", "rank 0"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The report of a load.

    Attributes:
        missing: Names of the model that the checkpoint lacks and that are unchanged; empty if the load was strict.
        unexpected: Names of the checkpoint that the model lacks; empty if the load was strict.
        mapped: The file of each tensor that stays on the disk, by every name that the model has for it.
        computed: Names of tensors that the map places on the disk but that are in memory, since the model computes
            them and no file holds them.
        converted_at_use: The compute dtypes of the tensors in `mapped` that their file holds in another dtype, and
            that are cast at use.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mapped: Mapping[str, MappedFile]
    computed: tuple[str, ...]
    converted_at_use: Mapping[str, torch.dtype]


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: Path | str,
    device_map: Mapping[str, Device] | None = None,
    *,
    dtype: torch.dtype | None = None,
    special_dtypes: Mapping[str, torch.dtype] | None = None,
    strict: bool = True,
    rename: Callable[[str], str | None] | None = None,
    num_threads: int | None = None,
    progress: Progress | None = None,
    read_by: ReadBy = "each",
    process_group: dist.ProcessGroup | None = None,
    quantization: Quantization | StoredFP8 | None = None,
    offload_folder: Path | str | None = None,
) -> LoadReport:
    """Load weights into a model, each tensor straight to its device and dtype.

    The file headers are checked before any tensor is read, and the model changes only once all tensors are read: an
    error leaves it unchanged. The host holds the tensors placed on it and 8 MiB per thread. Tied parameters stay
    tied; the checkpoint may have one of their names, or several with equal values. Parameters that have memory stay
    the same objects, and both values are held for a moment. Of parameters that are sharded among ranks (DTensor, as
    made by `fully_shard`), each rank reads its shard. Non-persistent buffers are unchanged.

    Args:
        model: The model, usually on the meta device; changed in place.
        checkpoint: A safetensors file, the index of several, or a folder that holds one of them; or the same in
            torch's own format (`.bin`, `.pt`, `.pth`), of which only tensors are read and no code runs.
        device_map: A mapping from names of modules, parameters or buffers to devices; tensors on `"disk"` become
            mapped pages of the file. None keeps each tensor on its device, and places those on the meta device on the
            CPU. A tied tensor goes to the first device among its names, and only without one to the disk.
        dtype: The dtype for floating-point and complex tensors; None keeps the model's dtypes.
        special_dtypes: The dtypes of single tensors by name, which override `dtype`.
        strict: Whether the checkpoint must have exactly the model's names.
        rename: A function from a checkpoint's name to the model's; a tensor for which it returns None is skipped.
        num_threads: The number of threads that read; None takes one per processor, four at most.
        progress: A function called with the bytes read so far and the total.
        read_by: `"each"` if every rank reads for itself; `"rank 0"` if that rank reads and broadcasts to
            `process_group`, all ranks of which must call this function. The other ranks then need the checkpoint only
            for tensors that stay on the disk.
        process_group: The process group that rank 0 reads for; None for all ranks.
        quantization: How weights of linear layers are packed while read, on the device that computes them, one at a
            time, so that only one is held in full. They are not trained. `StoredFP8()` keeps fp8 weights.
        offload_folder: The folder for packed and converted weights on the disk; its files are the user's to delete.

    Raises:
        WeightFilesError: A file is missing, damaged, or changed while it was read.
        WeightsMismatchError: Names or shapes do not fit, or a tensor would stay on the meta device. Names all.
        TiedParametersError: The checkpoint has different values for one parameter.
        DeviceMapError: The map does not fit the model or the machine.
        LoadError: A device has no room, or another rank failed.
        ValueError: Another argument is invalid.
    """
    check_load(dtype, quantization, progress)
    _check_arguments(model, device_map, read_by, num_threads)
    options = _Options(dtype=dtype, special_dtypes=special_dtypes, strict=strict, rename=rename)
    with _Load(model, Path(checkpoint), device_map, options, quantization, offload_folder) as load:
        if read_by == "each":
            return load.alone(num_threads, progress)
        return load.by(Relay(process_group), progress)


class _Options(TypedDict):
    """The arguments that a load passes on to its plan."""

    dtype: torch.dtype | None
    special_dtypes: Mapping[str, torch.dtype] | None
    strict: bool
    rename: Callable[[str], str | None] | None


class _Load:
    """The steps of a load. The end of its block drops the values read, so that a kept error holds no memory."""

    def __init__(
        self,
        model: nn.Module,
        checkpoint: Path,
        device_map: Mapping[str, Device] | None,
        options: _Options,
        quantization: Quantization | StoredFP8 | None,
        folder: Path | str | None,
    ) -> None:
        self._model = model
        self._checkpoint = checkpoint
        self._device_map = device_map
        self._options = options
        self._folder = folder
        # By the checkpoint's names, or the model's if it is converted.
        self._files: dict[str, WeightSource] = {}
        self._written: dict[str, WeightSource] = {}  # tensors on the disk in another form, by the same names
        self._held = ChainMap(self._written, self._files)
        self._computed: tuple[str, ...] = ()
        self._keeps_fp8 = isinstance(quantization, StoredFP8)
        self._packing = _packing(quantization, self._held, folder)
        self._targets: dict[str, Tensor] = {}  # the memory of tensors that are read, by the same names

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._targets.clear()
        if kind is not None:
            self._packing.undo()

    def alone(self, num_threads: int | None, progress: Progress | None) -> LoadReport:
        """Load with this rank reading for itself."""
        stored = self._open()
        plan = self._write_converted(self._prepare(stored))
        boxes = {arrival.stored: arrival.box for arrival in plan.arrivals if arrival.box is not None}
        progress = progress and _in_all(progress, stored, _read_by(plan))

        def read(targets: Mapping[str, Tensor]) -> None:
            fill(stored, targets, self._files, boxes=boxes, num_threads=num_threads, progress=progress)

        read(self._targets)
        self._packing.pack(plan.arrivals, self._devices(plan), read)
        apply_changes(self._model, self._changes(plan))
        return self._done(plan)

    def by(self, relay: Relay, progress: Progress | None) -> LoadReport:
        """Load what rank 0 reads for all ranks."""
        stored = relay.from_reader(self._open)
        prepared = relay.together(lambda: self._prepare(stored))
        plan = relay.together(lambda: self._write_converted(prepared))

        wanted = relay.wanted_by_any(_read_by(plan))
        progress = progress and _in_all(progress, stored, wanted)

        def read(targets: Mapping[str, Tensor]) -> None:
            relay.fill(stored, targets, self._files, progress=progress)

        def read_all() -> list[Assignment]:
            read(self._targets)
            self._packing.pack(plan.arrivals, self._devices(plan), read, together=relay.together)
            return self._changes(plan)

        apply_changes(self._model, relay.together(read_all))
        return self._done(plan)

    def _open(self) -> dict[str, Stored]:
        files = open_weights(self._checkpoint)
        renamed = self._options["rename"] is not None
        found = files if renamed else convert(self._model, self._checkpoint, files, keep_fp8=self._keeps_fp8)
        self._files.clear()
        self._files.update(found)
        return {
            name: Stored(file.tensor_shape(name), file.tensor_dtype(name), file.divisible(name))
            for name, file in self._files.items()
        }

    def _prepare(self, stored: Mapping[str, Stored]) -> LoadPlan:
        """Plan and check the load, and allocate its memory."""
        devices = self._device_map
        places = present_places(self._model) if devices is None else places_of_tensors(self._model, devices)
        check_places(places.values())
        plan = plan_load(
            self._model,
            without_parts(stored),
            places,
            checkpoint=str(self._checkpoint),
            quantization=self._packing.quantization,
            **self._options,
        )
        plan = self._packing.planned(plan, stored)
        on_disk = any(arrival.place == "disk" for arrival in plan.arrivals)
        if on_disk and not self._files and self._open() != dict(stored):  # only rank 0 has read the headers
            raise WeightFilesError(
                f"{self._checkpoint} is not on this rank what it is on rank 0: copy it here again"
            )
        self._packing.check(plan.arrivals)
        plan, self._computed = with_computed_in_memory(plan, self._files)
        check_folder(plan, self._files, self._folder)
        if self._files:
            check_copies(plan.arrivals, self._files)
        allocate(plan.arrivals, self._targets)
        return plan

    def _write_converted(self, plan: LoadPlan) -> LoadPlan:
        plan, written = write_converted(plan, self._files, self._folder)
        self._written.update(written)
        return plan

    def _devices(self, plan: LoadPlan) -> dict[str, torch.device]:
        """Return the device that computes with each tensor, if any is packed."""
        if not any(arrival.is_packed for arrival in plan.arrivals):
            return {}
        places = present_places(self._model) if self._device_map is None else self._device_map
        return {name: placement.device for name, placement in placements_of(self._model, places).items()}

    def _changes(self, plan: LoadPlan) -> list[Assignment]:
        for file in {id(file): file for file in self._files.values()}.values():
            file.check_unchanged()
        return changes_of(self._model, plan.arrivals, self._targets, self._held, self._packing)

    def _done(self, plan: LoadPlan) -> LoadReport:
        if any(arrival.is_packed for arrival in plan.arrivals):
            refuse_to_save(self._model)
        return _report(plan, {**self._held, **self._packing.files}, self._computed)


def _packing(
    quantization: Quantization | StoredFP8 | None,
    files: Mapping[str, WeightSource],
    folder: Path | str | None,
) -> Packing:
    return StoredPacking(files) if isinstance(quantization, StoredFP8) else Packing(quantization, folder)


def _check_arguments(model: nn.Module, device_map: object, read_by: str, num_threads: int | None) -> None:
    if read_by not in get_args(ReadBy):
        raise ValueError(f"read_by={read_by!r}: must be one of {', '.join(map(repr, get_args(ReadBy)))}")
    if num_threads is not None and num_threads < 1:
        raise ValueError(f"num_threads={num_threads}: must be at least 1")
    divided = [name for name, parameter in model.named_parameters() if is_dtensor(parameter)]
    if divided and (device_map is not None or read_by != "each"):
        raise ValueError(
            f"{divided[0]!r} is divided among ranks: each reads its part, to where that is; give neither device_map "
            "nor read_by"
        )


def _read_by(plan: LoadPlan) -> list[str]:
    """Return the names in the checkpoint of the tensors that a plan reads."""
    return [arrival.stored for arrival in plan.arrivals if arrival.is_read or arrival.is_packed]


def _in_all(progress: Progress, stored: Mapping[str, Stored], names: Collection[str]) -> Progress:
    """Return one progress for several reads, as packed weights are read one after the other."""
    return WholeProgress(progress, sum(piece.size_bytes for piece in pieces_of(stored, names)))


def _report(plan: LoadPlan, files: Mapping[str, WeightSource], computed: tuple[str, ...]) -> LoadReport:
    on_disk = [arrival for arrival in plan.arrivals if arrival.place == "disk"]
    mapped = {
        arrival.stored: file for arrival in on_disk if (file := files[arrival.stored].file_of(arrival.stored))
    }
    return LoadReport(
        missing=plan.missing,
        unexpected=plan.unexpected,
        mapped={name: mapped[arrival.stored] for arrival in on_disk for name in arrival.names},
        computed=computed,
        converted_at_use={
            name: arrival.dtype
            for arrival in on_disk
            if arrival.dtype != arrival.stored_dtype and not arrival.is_packed
            for name in arrival.names
        },
    )
