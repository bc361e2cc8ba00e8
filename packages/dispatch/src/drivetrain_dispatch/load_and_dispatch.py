"""Load a checkpoint straight to the devices of a device map: plan, load and dispatch in one call."""

from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import torch
from torch import nn

from drivetrain_dispatch.inference_engines import InferenceEngine, find_engine
from drivetrain_dispatch.loading.checkpoint_tensors import (
    Progress,
    WeightLoadOptions,
    check_load_dtype,
    open_checkpoint,
)
from drivetrain_dispatch.loading.load_checkpoint import check_sharded, load_tensors
from drivetrain_dispatch.loading.quantize_on_load import with_quantized_sizes
from drivetrain_dispatch.loading.tensor_reader import EachRank
from drivetrain_dispatch.model.model_layout import ModelLayout, listed
from drivetrain_dispatch.offload.dispatch import carry_out, check_not_dispatched, plan_dispatch
from drivetrain_dispatch.offload.mapped_weights import check_release
from drivetrain_dispatch.planning.blocks import blocks_of
from drivetrain_dispatch.planning.device_map import (
    HOST,
    Device,
    check_map,
    check_places,
    place_of,
    placements_of,
)
from drivetrain_dispatch.planning.infer_device_map import plan_device_map
from drivetrain_dispatch.planning.memory_budget import balanced_budgets, get_max_memory
from drivetrain_dispatch.quantization.protocol import Quantization, StoredFP8

# How a device map is planned: "balanced" (the same as "auto") spreads the model evenly over the accelerators,
# "balanced_low_0" does so but leaves the first one to generation, and "sequential" fills one after the other.
Way: TypeAlias = Literal["auto", "balanced", "balanced_low_0", "sequential"]
_WAYS = f"one of {', '.join(map(repr, get_args(Way)))}"


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: Path | str,
    device_map: Mapping[str, Device] | Way | None = None,
    max_memory: Mapping[Device, int | str] | None = None,
    *,
    no_split_module_classes: Collection[str] = (),
    dtype: torch.dtype | None = None,
    keep_in_fp32_modules: Collection[str] = (),
    strict: bool = True,
    rename: Callable[[str], str | None] | None = None,
    progress: Progress | None = None,
    offload_folder: Path | str | None = None,
    release_pages: bool = False,
    offload_buffers: bool = False,
    preload_module_classes: Collection[str] = (),
    skip_keys: Collection[str] = (),
    quantization: Quantization | StoredFP8 | None = None,
    engine: str | None = None,
) -> nn.Module:
    """Load and dispatch a model larger than the accelerator or the machine, by a given or a planned device map.

    Args:
        model: The model, usually from `init_empty_weights`; changed in place.
        checkpoint: A weight file, the index of several, or a folder that holds one of them.
        device_map: Devices by name; or "auto", "balanced", "balanced_low_0", "sequential" to plan; None only loads.
        max_memory: The memory budget of each device for a planned map; None takes the free memory.
        no_split_module_classes: Names of module classes that a planned map keeps whole.
        dtype: The dtype in which floating-point tensors compute; None keeps the model's dtypes.
        keep_in_fp32_modules: Names of modules at any depth, such as "wo", whose tensors stay in fp32.
        strict: Whether the checkpoint must have exactly the model's names.
        rename: A function from a checkpoint's name to the model's; a tensor for which it returns None is skipped.
        progress: A function called with the bytes read so far and the total.
        offload_folder: The folder for weights on the disk that no file holds in final form, such as packed ones.
        release_pages: Whether pages leave this process's memory once the host has used them; see `dispatch_model`.
        offload_buffers: Whether buffers are offloaded too.
        preload_module_classes: Names of module classes whose weights are fetched all at once.
        skip_keys: Keyword arguments of a forward that stay on their device.
        quantization: The packing of weights, as for `load_checkpoint_in_model`; a planned map counts packed sizes.
        engine: The name of another library's engine that runs the loaded model instead, such as "deepspeed"; called
            on all ranks. It reads `dtype` and `offload_folder`; what says how a model is dispatched is refused.

    Raises:
        EngineNotFoundError: No installed package provides the engine.
        DeviceMapError: No map fits the budgets, or the map does not fit the model or the machine.
        ValueError: Another argument is invalid.
    """
    options = WeightLoadOptions(
        strict=strict, rename=rename, progress=progress, quantization=quantization, offload_folder=offload_folder,
    )  # fmt: skip
    check_load_dtype(dtype)
    run_by = None if engine is None else _find_engine(
        engine, device_map=device_map, max_memory=max_memory, no_split_module_classes=no_split_module_classes,
        keep_in_fp32_modules=keep_in_fp32_modules, release_pages=release_pages, offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes, skip_keys=skip_keys, quantization=quantization,
    )  # fmt: skip
    _check_device_map(device_map, max_memory, release_pages, offload_buffers)
    layout = ModelLayout.of(model, dtype=dtype, at_once=preload_module_classes)
    layout = _keep_in_fp32(layout, keep_in_fp32_modules)
    check_not_dispatched(model)
    check_sharded(layout, device_map, options)
    opened = open_checkpoint(layout, Path(checkpoint), options)
    layout = with_quantized_sizes(layout, opened.specs, quantization)
    if isinstance(device_map, str):
        blocks = blocks_of(layout, no_split=no_split_module_classes, offload_buffers=offload_buffers)
        budgets = get_max_memory(max_memory)
        if max_memory is not None:
            check_places(map(place_of, budgets), "max_memory")
        if device_map != "sequential":
            budgets = balanced_budgets(budgets, blocks, low_zero=device_map == "balanced_low_0")
        device_map = plan_device_map(blocks, budgets, converts=layout.converts)
    placements = (
        None if device_map is None else placements_of(layout, device_map, offload_buffers=offload_buffers)
    )
    report = load_tensors(layout, opened, placements, options, EachRank())
    if run_by is not None:
        folder = None if offload_folder is None else Path(offload_folder)
        return run_by(model, dtype=dtype, offload_folder=folder)
    if device_map is None or placements is None:
        return model
    placed = copy(device_map) if isinstance(device_map, dict) else dict(device_map)
    for name in report.computed:  # the model computes it, and it is on the host now
        placements[name], placed[name] = placements[name]._replace(home=HOST), "cpu"
    # The model has other tensors now, and a library's layers for packed weights, under the same names.
    layout = ModelLayout.of(model, at_once=preload_module_classes)
    plan = plan_dispatch(layout, placements, mapped=report.mapped, dtypes=report.converted_at_use)
    return carry_out(plan, placed, offload_folder, release_pages=release_pages, skip_keys=skip_keys)


def _keep_in_fp32(layout: ModelLayout, in_fp32: Collection[str]) -> ModelLayout:
    """Return a layout in which the tensors of named modules become fp32."""
    special: dict[str, torch.dtype] = {}
    for part in listed(in_fp32):
        names = [
            name
            for name, tensor in layout.tensors.items()
            if tensor.is_floating_point() and part in name.split(".")[:-1]
        ]
        if not names:
            raise ValueError(
                f"keep_in_fp32_modules={part!r}: the model has no module called so; see named_modules()"
            )
        special.update(dict.fromkeys(names, torch.float32))
    return replace(layout, special_dtypes=special)


def _find_engine(engine: str, **of_dispatch: object) -> InferenceEngine:
    """Return an engine; refuse arguments of what it does in its own way."""
    if said := [name for name, value in of_dispatch.items() if value not in (None, False, ())]:
        raise ValueError(
            f"engine={engine!r} runs the model itself, and reads no {', '.join(said)}: leave that out, or the engine"
        )
    return find_engine(engine)


def _check_device_map(
    device_map: object, max_memory: object, release_pages: bool, offload_buffers: bool
) -> None:
    """Check the form of a device map, and the arguments that need one."""
    check_release(release_pages)
    for name, asked in (("release_pages", release_pages), ("offload_buffers", offload_buffers)):
        if asked and device_map is None:
            raise ValueError(
                f"{name}=True is for a model that is dispatched, and device_map=None only loads it: leave it out, or "
                f"give device_map, {_WAYS}"
            )
    if device_map is not None and device_map not in get_args(Way):
        check_map(device_map, f", or {_WAYS} to plan one")
    if max_memory is not None and not isinstance(device_map, str):
        raise ValueError(
            f"max_memory={max_memory!r} is for a map that is planned: leave it out, or give device_map {_WAYS}"
        )
