"""Load a checkpoint into a model: plan and check, then read, and change the model only at the end."""

from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain_dispatch.conversion.lazy_tensor import LazyTensor
from drivetrain_dispatch.errors import LoadError, WeightFilesError
from drivetrain_dispatch.loading.checkpoint_tensors import (
    CheckpointTensors,
    Progress,
    ReadBy,
    WeightLoadOptions,
    check_load_dtype,
    open_checkpoint,
)
from drivetrain_dispatch.loading.file_backed import with_files, write_converted
from drivetrain_dispatch.loading.load_plan import LoadPlan, PlannedTensor, plan_load
from drivetrain_dispatch.loading.load_target import (
    Assignment,
    apply_assignments,
    assignment,
    load_target,
    refuse_to_save,
)
from drivetrain_dispatch.loading.quantize_on_load import KeepStoredFP8, QuantizeOnLoad, with_quantized_sizes
from drivetrain_dispatch.loading.rank0_broadcast import Rank0Broadcast
from drivetrain_dispatch.loading.tensor_reader import EachRank, pieces_of
from drivetrain_dispatch.model.model_layout import ModelLayout
from drivetrain_dispatch.planning.device_map import (
    HOST,
    Device,
    Placement,
    Tier,
    check_places,
    read_device_map,
)
from drivetrain_dispatch.planning.memory_budget import free_bytes
from drivetrain_dispatch.quantization.protocol import Quantization, StoredFP8
from drivetrain_messages import format_size
from drivetrain_weights import MappedFile
from drivetrain_weights.tensor_box import is_dtensor

WeightReader: TypeAlias = EachRank | Rank0Broadcast
WeightPacker: TypeAlias = QuantizeOnLoad | KeepStoredFP8


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The report of a load.

    Attributes:
        missing: Names of the model's tensors that the checkpoint lacks, left unchanged; empty if the load was strict.
        unexpected: Names of the checkpoint that the model lacks; empty if the load was strict.
        mapped: The file of each tensor on the disk, by all its names in the model.
        computed: Names of tensors that the map places on the disk but no file holds. The model computes these
            tensors, and they are in memory.
        converted_at_use: The compute dtypes of the tensors in `mapped` that are stored in another dtype and cast at
            use.
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
    error leaves it unchanged. The host holds the tensors placed on it and 8 MiB per thread. Tensors that need no
    conversion stay pages of their safetensors file until they are written to; the file may be replaced or deleted,
    but not cut. Tied parameters stay tied; the checkpoint may have one of their names, or several with equal values.
    Parameters that have memory stay the same objects; their old and new values exist together for a moment. Each rank
    reads its shard of sharded parameters (DTensor, as made by `fully_shard`). Non-persistent buffers are unchanged.

    Args:
        model: The model, usually on the meta device; changed in place.
        checkpoint: A safetensors file, the index of several, or a folder that holds one of them; or the same in
            torch's own format (`.bin`, `.pt`, `.pth`), of which only tensors are read and no code runs.
        device_map: A mapping from names of modules, parameters or buffers to devices; tensors on `"disk"` are pages
            of the file. None keeps each tensor on its device, and moves meta tensors to the CPU. A tied tensor goes
            to the first device among its names, or to the disk if no name has a device.
        dtype: The dtype for floating-point and complex tensors; None keeps the model's dtypes.
        special_dtypes: The dtypes of single tensors by name, which override `dtype`.
        strict: Whether the checkpoint must have exactly the model's names.
        rename: A function from a checkpoint's name to the model's; a tensor for which it returns None is skipped.
        num_threads: The number of threads that read; None takes one per processor, four at most.
        progress: A function called with the bytes read so far and the total.
        read_by: `"each"` if every rank reads for itself; `"rank 0"` if that rank reads and broadcasts to all of
            `process_group`, which must call this. The other ranks need the checkpoint only for tensors on the disk.
        process_group: The process group that rank 0 reads for; None for all ranks.
        quantization: The packing of linear layers' weights, as each is read, on its computing device. Packed weights
            are frozen. `StoredFP8()` keeps fp8 weights.
        offload_folder: The folder for packed and converted weights on the disk; its files are the user's to delete.

    Raises:
        WeightFilesError: A file is missing, damaged, or changed while it was read.
        WeightsMismatchError: Names or shapes do not fit, or a tensor would stay on the meta device. Lists all.
        TiedParametersError: The checkpoint has different values for one parameter.
        DeviceMapError: The map does not fit the model or the machine.
        LoadError: A device has no room, or another rank failed.
        ValueError: Another argument is invalid.
    """
    options = WeightLoadOptions(
        strict=strict, rename=rename, num_threads=num_threads, progress=progress, read_by=read_by,
        process_group=process_group, quantization=quantization, offload_folder=offload_folder,
    )  # fmt: skip
    check_load_dtype(dtype)
    layout = ModelLayout.of(model, dtype=dtype, special_dtypes=special_dtypes)
    path = Path(checkpoint)
    check_sharded(layout, device_map, options)  # on all ranks alike, before one opens files for the others
    each = options.read_by == "each"
    reader = EachRank(options.num_threads) if each else Rank0Broadcast(options.process_group)
    opened = reader.open(path, lambda: open_checkpoint(layout, path, options))
    sized = reader.together(lambda: with_quantized_sizes(layout, opened.specs, options.quantization))
    if device_map is None:
        return load_tensors(sized, opened, None, options, reader)
    placements = reader.together(lambda: read_device_map(layout, device_map))
    return load_tensors(sized, opened, placements, options, reader)


def load_tensors(
    layout: ModelLayout,
    checkpoint: CheckpointTensors,
    placements: Mapping[str, Placement] | None,
    options: WeightLoadOptions,
    reader: WeightReader,
) -> LoadReport:
    """Load the tensors of an open checkpoint to their placements, or to the devices that they are on.

    Every rank that `reader` reads for must call this.
    """
    load = _Load(layout=layout, checkpoint=checkpoint, placements=placements, options=options, reader=reader)
    with load:
        plan = reader.together(load.plan)
        plan = reader.together(lambda: load.write_converted(plan))
        changes = reader.together(lambda: load.read(plan))
        apply_assignments(layout.model, changes)
        if plan.quantized:
            refuse_to_save(layout.model)
        return load.report(plan)


def check_sharded(layout: ModelLayout, device_map: object, options: WeightLoadOptions) -> None:
    """Check that each rank of a sharded model loads its own shard, in place."""
    sharded = [name for name, tensor in layout.parameters.items() if is_dtensor(tensor)]
    if sharded and (device_map is not None or options.read_by != "each"):
        raise ValueError(
            f"weight {sharded[0]!r} is sharded: each rank loads its own shard in place; leave out device_map and "
            "read_by"
        )


@dataclass(kw_only=True)
class _Load:
    """The steps of a load. The end of its block drops all read values, as a kept error would hold them."""

    layout: ModelLayout
    checkpoint: CheckpointTensors
    placements: Mapping[str, Placement] | None
    options: WeightLoadOptions
    reader: WeightReader
    # By the checkpoint's names; the sources of tensors that were written in another form come first.
    values: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    sources: ChainMap[str, LazyTensor] = field(default_factory=ChainMap[str, LazyTensor])
    packer: WeightPacker | None = None

    def __enter__(self) -> Self:
        self.sources = ChainMap({}, dict(self.checkpoint.sources))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.values.clear()
        if kind is not None and self.packer is not None:
            self.packer.undo()

    def plan(self) -> LoadPlan:
        """Plan and check the load, and allocate its memory."""
        layout, options, placements = self.layout, self.options, self.placements
        if placements is None:
            homes = {name: load_target(name, tensor).home for name, tensor in layout.tensors.items()}
            placements = {name: Placement(home, home) for name, home in homes.items()}
        check_places(placement.home for placement in placements.values())
        plan = plan_load(layout, self.checkpoint, placements, options)
        if not self.sources and any(planned.on_disk for planned in plan.tensors):
            # Open the checkpoint here too: this rank has only its descriptions from rank 0.
            opened = open_checkpoint(layout, self.checkpoint.path, options)
            if opened.specs != self.checkpoint.specs:
                raise WeightFilesError(
                    f"{opened.path} is not on this rank what it is on rank 0: copy it here again"
                )
            # In rank 0's order, which all ranks read and broadcast in: here the tensors may lie in other files.
            self.checkpoint = replace(opened, specs=self.checkpoint.specs)
            self.sources.update(opened.sources)
        maps_host = options.read_by == "each"
        plan = with_files(plan, self.sources, options.offload_folder, maps_host=maps_host)
        if self.sources:
            for planned in plan.tensors:
                self.checkpoint.check_copies(planned.stored, planned.copies)
        if plan.quantized and options.quantization is not None:
            if isinstance(options.quantization, StoredFP8):
                self.packer = KeepStoredFP8(self.checkpoint.specs, self.sources)
            else:
                self.packer = QuantizeOnLoad(options.quantization, placements, options.offload_folder)
        allocate(plan.tensors, self.values)
        return plan

    def write_converted(self, plan: LoadPlan) -> LoadPlan:
        """Write the tensors that the disk holds in another form than the checkpoint does."""
        plan, written = write_converted(plan, self.sources, self.options.offload_folder)
        self.sources.update(written)
        return plan

    def read(self, plan: LoadPlan) -> list[Assignment]:
        """Read all values, and return the changes that they make to the model."""
        boxes = {planned.stored: planned.box for planned in plan.tensors if planned.box is not None}
        names = self.reader.wanted_by_any(name for planned in plan.tensors for name in planned.reads)
        pieces = pieces_of(self.checkpoint.specs, names, boxes)
        mapped = sum(planned.size_bytes for planned in plan.tensors if planned.maps and planned.in_memory)
        all_bytes, done_bytes = mapped + sum(piece.size_bytes for piece in pieces), 0

        def add(size_bytes: int) -> None:
            nonlocal done_bytes
            done_bytes += size_bytes
            if self.options.progress is not None:
                self.options.progress(done_bytes, all_bytes)

        def read(targets: Mapping[str, Tensor]) -> None:
            self.reader.read(self.checkpoint, targets, boxes, add)

        def packed(planned: PlannedTensor, packer: WeightPacker) -> nn.Parameter:
            memory = self.reader.together(lambda: packer.allocate(planned))  # one weight is held in full
            read(memory)
            return self.reader.together(lambda: packer.pack(planned, memory))

        if mapped:
            add(mapped)
        read(self.values)
        for index, planned in enumerate(plan.tensors):
            if planned.is_quantized and self.packer is not None:
                try:
                    self.values[planned.stored] = packed(planned, self.packer)
                except (torch.OutOfMemoryError, MemoryError) as error:
                    raise no_room(planned, plan.tensors[:index], plan.tensors) from error
        self.checkpoint.check_unchanged()
        return [change for planned in plan.tensors for change in self._changes(planned)]

    def _changes(self, planned: PlannedTensor) -> list[Assignment]:
        """Return the changes for one tensor: a new value, and for some packed weights a new layer."""
        names, value = planned.names, self.values.get(planned.stored)
        if self.packer is not None and planned.is_quantized and isinstance(value, nn.Parameter):
            modules = tuple(name.rpartition(".")[0] for name in names)
            layer = self.packer.layer(self.layout.modules[modules[0]], value)
            return [Assignment(names, value) if layer is None else Assignment(modules, layer)]
        if value is None and planned.maps:
            value = self.sources[planned.stored].values()
        elif value is None:
            value = torch.empty(planned.shape, dtype=planned.dtype, device="meta")
        return [assignment(names, planned.target, value)]

    def report(self, plan: LoadPlan) -> LoadReport:
        """Return the report of the load."""
        packed = {} if self.packer is None else self.packer.files
        mapped: dict[str, MappedFile] = {}
        for planned in plan.tensors:
            if planned.on_disk:
                file = packed.get(planned.stored) or self.sources[planned.stored].mapped_file()
                mapped.update(dict.fromkeys(planned.names, file) if file is not None else {})
        return LoadReport(
            missing=plan.missing,
            unexpected=plan.unexpected,
            mapped=mapped,
            computed=plan.computed,
            converted_at_use={
                name: planned.dtype
                for planned in plan.tensors
                if planned.converted_at_use
                for name in planned.names
            },
        )


def allocate(tensors: Sequence[PlannedTensor], into: MutableMapping[str, Tensor]) -> None:
    """Allocate all tensors to read; tensors to pack get their memory later, one by one."""
    in_memory = [planned for planned in tensors if planned.in_memory]
    try:
        # The system overcommits memory, and would kill the process later. Pages of a file may be written to.
        free, taken = free_bytes(HOST), 0
        on_host = [planned for planned in in_memory if planned.tier is Tier.HOST]
        for index, planned in enumerate(on_host):
            taken += planned.size_bytes
            if free is not None and taken > free:
                raise no_room(planned, on_host[:index], on_host, free=free - taken + planned.size_bytes)
        for index, planned in enumerate(in_memory):
            if planned.is_quantized or planned.maps:
                continue
            try:
                memory = torch.empty(planned.shape, dtype=planned.dtype, device=planned.place)
            except (RuntimeError, MemoryError) as error:  # here torch raises only for lack of memory
                raise no_room(planned, in_memory[:index], in_memory) from error
            into[planned.stored] = memory
    except LoadError:
        into.clear()
        raise


def no_room(
    planned: PlannedTensor,
    before: Sequence[PlannedTensor],
    tensors: Sequence[PlannedTensor],
    *,
    free: int | None = None,
) -> LoadError:
    """Return the error for a tensor that a device has no room for."""
    place = planned.place
    taken = sum(other.size_bytes for other in before if other.place == place)
    wanted = sum(other.size_bytes for other in tensors if other.place == place)
    if free is None and place != "disk":
        free = free_bytes(place)
    fits = "" if free is None else f", {format_size(free)} are left, so about {format_size(taken + free)} fit"
    return LoadError(
        f"{place} has no room for {planned.names[0]!r} ({format_size(planned.size_bytes)}): of the "
        f"{format_size(wanted)} that device_map puts there {format_size(taken)} went before{fits}. Put less there "
        "(on another device, or on 'disk'), or give a smaller dtype. The model is as it was"
    )
