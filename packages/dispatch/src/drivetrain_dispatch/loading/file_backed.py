"""Tensors of a load whose values stay in files: on the disk, or as pages in the host's memory."""

import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import torch

from drivetrain_dispatch.conversion.lazy_tensor import LazyTensor
from drivetrain_dispatch.errors import WeightFilesError
from drivetrain_dispatch.loading.load_plan import LoadPlan, PlannedTensor
from drivetrain_dispatch.planning.device_map import HOST, Tier
from drivetrain_messages import format_size, list_some
from drivetrain_weights import MappedFile
from drivetrain_weights.aligned_file import create_aligned

logger = logging.getLogger(__name__)


def with_files(
    plan: LoadPlan, sources: Mapping[str, LazyTensor], folder: Path | str | None, *, maps_host: bool
) -> LoadPlan:
    """Plan which tensors stay in a file, and which are written to a file first; computed tensors have no file."""
    computed: list[str] = []
    tensors: list[PlannedTensor] = []
    for planned in plan.tensors:
        if any(name in sources and not sources[name].files() for name in planned.maps):
            computed.extend(planned.names)
            planned = replace(planned, place=HOST, reads=planned.maps, maps=())
        tensors.append(_map_on_host(planned, sources) if maps_host else planned)
    to_pack = [planned for planned in plan.quantized if planned.on_disk and not planned.maps]
    if to_pack and folder is None:
        names = [planned.names[0] for planned in to_pack]
        raise ValueError(
            f"device_map puts {list_some(map(repr, names), most=1)} on the disk, and no file holds them packed yet: "
            "name a folder for them, offload_folder=..."
        )
    to_write: dict[str, torch.dtype] = {}
    write_bytes = 0
    for planned in tensors:
        if not planned.maps or not all(name in sources for name in planned.maps):
            continue
        files = {sources[name].mapped_file() for name in planned.maps}
        if None in files or len(files) > 1:  # the parts of a weight must be in one file
            write_bytes += planned.size_bytes
            for name in planned.maps:
                to_write[name] = planned.dtype if name == planned.stored else sources[name].dtype
    if to_write and folder is None:
        raise ValueError(
            f"device_map puts {list_some(map(repr, to_write), most=1)} on the disk, and the checkpoint holds them in "
            f"another form: name a folder where {format_size(write_bytes)} are written once, offload_folder=..."
        )
    return replace(plan, tensors=tuple(tensors), computed=tuple(computed), to_write=to_write)


def write_converted(
    plan: LoadPlan, sources: Mapping[str, LazyTensor], folder: Path | str | None
) -> tuple[LoadPlan, dict[str, LazyTensor]]:
    """Write tensors that the disk holds in a converted form; return the plan with their dtypes, and all tensors."""
    if not plan.to_write or folder is None:
        return plan, {}
    file = _write_converted_file(sources, plan.to_write, Path(folder).expanduser())
    tensors = (
        replace(planned, stored_dtype=planned.dtype) if planned.stored in plan.to_write else planned
        for planned in plan.tensors
    )
    return replace(plan, tensors=tuple(tensors)), {
        name: LazyTensor.in_file(file, name) for name in plan.to_write
    }


def _write_converted_file(
    tensors: Mapping[str, LazyTensor], dtypes: Mapping[str, torch.dtype], folder: Path
) -> MappedFile:
    """Write converted tensors to a file in a folder, or open the file that an earlier call has written."""
    # A recipe contains the sizes and times of the checkpoint's files.
    recipes = "\n".join(f"{name} {dtypes[name]} {tensors[name].recipe()}" for name in sorted(dtypes))
    path = folder / f"converted-{hashlib.sha256(recipes.encode()).hexdigest()[:16]}.safetensors"
    if path.exists():
        try:
            earlier = MappedFile(path)
        except WeightFilesError as error:
            logger.warning("%s; it is written anew", error)
        else:
            if earlier.names >= dtypes.keys():
                logger.info("reading converted weights from %s", path)
                return earlier
    unfinished = path.with_name(f".{uuid4().hex[:12]}-{path.name}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            like = {
                name: torch.empty(tensors[name].shape, dtype=dtype, device="meta")
                for name, dtype in dtypes.items()
            }
            for name, target in create_aligned(like, unfinished).items():
                tensors[name].read_into(target)
            with unfinished.open("rb+") as written:
                os.fsync(written.fileno())  # also flushes pages that were changed through the mapping
            # Open before the rename, as another process may replace `path` with its own file.
            file = MappedFile(unfinished)
            os.replace(unfinished, path)
            file.path = path.absolute()
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise WeightFilesError(
            f"converted weights could not be written to {folder} ({error}): name another folder, or free the disk"
        ) from error
    logger.warning(
        "wrote %s of converted weights for the disk to %s; later loads of the same checkpoint with the same "
        "map reuse them",
        format_size(path.stat().st_size),
        path,
    )
    return file


def _map_on_host(planned: PlannedTensor, sources: Mapping[str, LazyTensor]) -> PlannedTensor:
    """Return a tensor's plan, without a copy if the host can use the tensor in its safetensors file."""
    # A write copies the page, and the file may be deleted or replaced; `torch.save` writes into an existing file.
    is_full = planned.box is None and not planned.is_quantized and planned.reads == (planned.stored,)
    is_kept = is_full and planned.tier is Tier.HOST and planned.dtype == planned.stored_dtype
    if not is_kept:
        return planned
    # The tensor must lie in its file as in memory.
    source = sources[planned.stored]
    file = source.mapped_file()
    if file is None or any(file.start_of(each.name) is None for each in source.inputs()):
        return planned
    value = source.values()
    is_aligned = value.data_ptr() % value.element_size() == 0
    if value.dtype != planned.dtype or not value.is_contiguous() or not is_aligned:
        return planned
    return replace(planned, reads=(), maps=planned.reads)
