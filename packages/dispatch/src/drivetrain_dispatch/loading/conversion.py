"""Convert checkpoints that hold a model's weights under other names or in another form."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from drivetrain_dispatch.conversion.converted_checkpoint import ConvertedCheckpoint
from drivetrain_dispatch.conversion.fp8_checkpoint import Fp8Weights, can_be_kept, dequantised, fp8_weights
from drivetrain_dispatch.conversion.lazy_tensor import LazyTensor
from drivetrain_dispatch.conversion.transformers_tables import converted_names
from drivetrain_dispatch.loading.keep_stored_fp8 import stored_parts
from drivetrain_dispatch.loading.load_plan import LoadPlan
from drivetrain_dispatch.loading.state_dict_diff import Stored
from drivetrain_dispatch.loading.weight_source import WeightSource
from drivetrain_dispatch.model.sizes import named_tensors
from drivetrain_weights import MappedFile, open_weights


def convert(
    model: nn.Module, checkpoint: Path, files: Mapping[str, MappedFile], *, keep_fp8: bool = False
) -> dict[str, WeightSource]:
    """Return a checkpoint's tensors by the model's names and in its form, without reading them.

    Args:
        model: The model that is loaded.
        checkpoint: The path that errors and reports name.
        files: The file of each tensor, by the checkpoint's names.
        keep_fp8: Whether to add the values and scales of fp8 weights, by the names of `stored_parts`.

    Raises:
        WeightFilesError: The checkpoint cannot be converted.
    """
    held = {name: LazyTensor.in_file(file, name) for name, file in files.items()}
    fp8 = fp8_weights(held, {name for name, _ in named_tensors(model)})
    found = converted_names(model, dequantised(held, fp8))
    if keep_fp8:
        found |= _kept_parts(model, fp8)
    if found.keys() == held.keys() and all(found[name] is tensor for name, tensor in held.items()):
        return dict(files)
    converted = ConvertedCheckpoint(checkpoint, found)
    return dict.fromkeys(sorted(found, key=lambda name: found[name].position()), converted)


def stored_sizes(model: nn.Module, checkpoint: Path) -> dict[str, int]:
    """Return the bytes in fp8 of the model's weights that a load can keep in fp8, by name.

    Raises:
        WeightFilesError: The path is no checkpoint, or one that cannot be converted.
    """
    files = convert(model, checkpoint, open_weights(checkpoint), keep_fp8=True)

    def size(name: str) -> int:
        return Stored(files[name].tensor_shape(name), files[name].tensor_dtype(name)).size_bytes

    return {name: sum(map(size, stored_parts(name))) for name in files if stored_parts(name)[0] in files}


def _kept_parts(model: nn.Module, fp8: Fp8Weights) -> dict[str, LazyTensor]:
    """Return the values and scales of the model's weights that can be kept in fp8."""
    every_values, every_scales = (converted_names(model, part) for part in fp8)
    found: dict[str, LazyTensor] = {}
    for name, values in every_values.items():
        scales = every_scales.get(name)
        if scales is not None and can_be_kept(values, scales):
            found.update(zip(stored_parts(name), (values, scales), strict=True))
    return found


def with_computed_in_memory(
    plan: LoadPlan, files: Mapping[str, WeightSource]
) -> tuple[LoadPlan, tuple[str, ...]]:
    """Move tensors that the model computes, and that no file holds, from the disk to memory.

    Returns:
        The plan, and the model's names of the tensors that were moved.
    """
    computed = {
        name
        for name in _to_write(plan, files)
        if isinstance(source := files[name], ConvertedCheckpoint) and source.is_computed(name)
    }
    arrivals = (
        replace(arrival, place=torch.device("cpu")) if arrival.stored in computed else arrival
        for arrival in plan.arrivals
    )
    moved = tuple(name for arrival in plan.arrivals if arrival.stored in computed for name in arrival.names)
    return replace(plan, arrivals=tuple(arrivals)), moved


def check_folder(plan: LoadPlan, files: Mapping[str, WeightSource], folder: Path | str | None) -> None:
    """Check that there is a folder for tensors that the disk keeps in another form than the checkpoint's.

    Raises:
        ValueError: The folder is missing.
    """
    names = _to_write(plan, files)
    if names and folder is None:
        size = sum(arrival.size_bytes for arrival in plan.arrivals if arrival.stored in names)
        raise ValueError(
            f"device_map puts {next(iter(names))!r} on the disk, and the checkpoint holds it in another form: name a "
            f"folder where it and {len(names) - 1} more ({size / 1e9:.2f} GB) are written once, offload_folder=..."
        )


def write_converted(
    plan: LoadPlan, files: Mapping[str, WeightSource], folder: Path | str | None
) -> tuple[LoadPlan, dict[str, MappedFile]]:
    """Write tensors that the disk keeps in another form than the checkpoint's, unless an earlier load has.

    Args:
        plan: The plan of the load.
        files: The file of each tensor, by the plan's stored names.
        folder: The folder for the file.

    Returns:
        The plan, in which these tensors are stored in their compute dtype, and the file of each tensor.

    Raises:
        WeightFilesError: The disk has no room.
    """
    names = _to_write(plan, files)
    if not names or folder is None:
        return plan, {}
    (checkpoint,) = {id(files[name]): files[name] for name in names}.values()
    assert isinstance(checkpoint, ConvertedCheckpoint)
    written = dict.fromkeys(names, checkpoint.written(names, Path(folder).expanduser()))
    arrivals = (
        replace(arrival, stored_dtype=arrival.dtype) if arrival.stored in names else arrival
        for arrival in plan.arrivals
    )
    return replace(plan, arrivals=tuple(arrivals)), written


def _to_write(plan: LoadPlan, files: Mapping[str, WeightSource]) -> dict[str, torch.dtype]:
    """Return the dtypes of the tensors that no file holds in their form on the disk, by the plan's stored names."""
    names: dict[str, torch.dtype] = {}
    for arrival in plan.arrivals:
        parts = stored_parts(arrival.stored)
        if arrival.place != "disk" or arrival.stored not in files:
            continue
        if not arrival.is_packed:
            if files[arrival.stored].file_of(arrival.stored) is None:
                names[arrival.stored] = arrival.dtype
        elif all(part in files for part in parts):
            found = {files[part].file_of(part) for part in parts}
            if None in found or len(found) > 1:  # the parts of a weight must be in one file
                names.update((part, files[part].tensor_dtype(part)) for part in parts)
    return names
