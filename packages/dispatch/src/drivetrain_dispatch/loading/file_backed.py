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


def with_computed_in_memory(plan: LoadPlan, sources: Mapping[str, LazyTensor]) -> LoadPlan:
    """Move tensors that the model computes and no file holds from the disk to memory."""
    computed: list[str] = []
    tensors: list[PlannedTensor] = []
    for planned in plan.tensors:
        if any(name in sources and not sources[name].files() for name in planned.maps):
            computed.extend(planned.names)
            planned = replace(planned, place=HOST, reads=planned.maps, maps=())
        tensors.append(planned)
    return replace(plan, tensors=tuple(tensors), computed=tuple(computed))


def check_folder(plan: LoadPlan, sources: Mapping[str, LazyTensor], folder: Path | str | None) -> None:
    """Check that there is a folder for tensors that the disk keeps in another form than the checkpoint's."""
    if folder is not None:
        return
    packed = [planned.names[0] for planned in plan.quantized if planned.on_disk and not planned.maps]
    if packed:
        raise ValueError(
            f"device_map puts {list_some(map(repr, packed), most=1)} on the disk, and no file holds them packed yet: "
            "name a folder for them, offload_folder=..."
        )
    names = _to_write(plan, sources)
    if names:
        size = sum(
            planned.size_bytes for planned in plan.tensors if not names.keys().isdisjoint(planned.maps)
        )
        raise ValueError(
            f"device_map puts {list_some(map(repr, names), most=1)} on the disk, and the checkpoint holds them in "
            f"another form: name a folder where {format_size(size)} are written once, offload_folder=..."
        )


def write_converted(
    plan: LoadPlan, sources: Mapping[str, LazyTensor], folder: Path | str | None
) -> tuple[LoadPlan, dict[str, LazyTensor]]:
    """Write tensors that the disk keeps in another form than the checkpoint's, unless an earlier load has.

    Return the plan, in which these tensors are stored in their compute dtype, and the tensors as the file holds them.
    """
    names = _to_write(plan, sources)
    if not names or folder is None:
        return plan, {}
    file = _write_converted_file(sources, names, Path(folder).expanduser())
    written = {name: LazyTensor.in_file(file, name) for name in names}
    tensors = (
        replace(planned, stored_dtype=planned.dtype) if planned.stored in names else planned
        for planned in plan.tensors
    )
    return replace(plan, tensors=tuple(tensors)), written


def _write_converted_file(
    tensors: Mapping[str, LazyTensor], dtypes: Mapping[str, torch.dtype], folder: Path
) -> MappedFile:
    """Write converted tensors to a file in a folder, or open the file that an earlier call has written.

    The file's name contains a hash of the tensors' recipes and of the sizes and times of the checkpoint's files.
    The file is never deleted here. Tensors are written one after the other, into the file's pages.
    """
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


def _to_write(plan: LoadPlan, sources: Mapping[str, LazyTensor]) -> dict[str, torch.dtype]:
    """Return the dtypes of the tensors that no file holds in their form on the disk, by the plan's stored names."""
    names: dict[str, torch.dtype] = {}
    for planned in plan.tensors:
        if not all(name in sources for name in planned.maps):
            continue
        files = {sources[name].mapped_file() for name in planned.maps}
        if None in files or len(files) > 1:  # the parts of a weight must be in one file
            names.update(
                (name, planned.dtype if name == planned.stored else sources[name].dtype)
                for name in planned.maps
            )
    return names


def with_mapped_in_memory(plan: LoadPlan, sources: Mapping[str, LazyTensor]) -> LoadPlan:
    """Return the plan of a load that copies no tensor which the host can use as it is in a safetensors file.

    A write to it copies the page, never into the file. It stays whole if the file is deleted, or replaced as all that
    write safetensors replace files. Files of torch's own are read: `torch.save` writes into the file that it finds.
    """

    def mapped(planned: PlannedTensor) -> PlannedTensor:
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

    return replace(plan, tensors=tuple(map(mapped, plan.tensors)))
