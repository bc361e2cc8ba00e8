"""A checkpoint straight to where a device map puts it: planned, loaded and dispatched in one call."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Literal, TypeAlias, TypedDict, get_args

import torch
from torch import nn

from drivetrain_dispatch.arguments import check_map
from drivetrain_dispatch.errors import OffloadedError
from drivetrain_dispatch.loading.arguments import check_load
from drivetrain_dispatch.loading.conversion import stored_sizes
from drivetrain_dispatch.loading.load_checkpoint import load_checkpoint_in_model
from drivetrain_dispatch.loading.tensor_reader import Progress
from drivetrain_dispatch.model.sizes import listed
from drivetrain_dispatch.model.units import units_of
from drivetrain_dispatch.offload.dispatch import dispatch_model, dispatched
from drivetrain_dispatch.offload.mapped_weights import check_release
from drivetrain_dispatch.planning.device_map import Device, DeviceMap, check_places, place_of
from drivetrain_dispatch.planning.infer_device_map import infer_auto_device_map
from drivetrain_dispatch.planning.memory_budget import get_balanced_memory, get_max_memory
from drivetrain_dispatch.planning.placement import placements_of
from drivetrain_dispatch.quantization.protocol import Quantization, StoredFP8, quantized_sizes

# How a map is planned: spread evenly over the accelerators ("auto" is that), the same with the first one left to what
# generation needs, or one after the other.
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
) -> nn.Module:
    """Load a model that may be larger than the accelerator, or the machine: plan a map, load by it, and dispatch.

    Args:
        model: The model, usually from `init_empty_weights`; changed in place.
        checkpoint: A file of weights, an index of several, or a folder.
        device_map: Device by name; or "auto", "balanced", "balanced_low_0" or "sequential" to plan it; None for none.
        max_memory: What a planned map may put where; None takes what is free.
        no_split_module_classes: Names of module classes that a planned map keeps whole.
        dtype: What floating-point tensors are computed in; None takes the model's dtypes.
        keep_in_fp32_modules: Names of modules, such as "wo", wherever they stand; what is in them is in fp32.
        strict: Whether the checkpoint must have the model's names and no others.
        rename: From a name of the checkpoint to the model's; None leaves a tensor out.
        progress: Called with the bytes that were read and all that are.
        offload_folder: For what the map keeps on the disk and no file holds, as it holds no packed weights.
        release_pages: Whether pages that the host computed with leave this process's memory; see `dispatch_model`.
        offload_buffers: Whether buffers are kept away from the device that computes too.
        preload_module_classes: Names of module classes whose weights come all at once.
        skip_keys: Keyword arguments of a forward that stay where they are.
        quantization: How weights are packed, as for `load_checkpoint_in_model`; a planned map counts them so.

    Raises:
        DeviceMapError: No map keeps within the budgets, or the map does not fit the model or the machine.
        ValueError: Another argument is wrong.
    """
    kinds = _Dtypes(dtype=dtype, special_dtypes=_in_fp32(model, keep_in_fp32_modules))
    check_load(dtype, quantization, progress)
    shown = _Shown(release_pages=release_pages, offload_buffers=offload_buffers)
    _check_early(model, device_map, max_memory, preload_module_classes, **shown)
    if isinstance(device_map, str):
        said = (kinds, _Away(offload_buffers=offload_buffers, preload_module_classes=preload_module_classes))
        sizes = _packed_sizes(model, checkpoint, quantization, kinds)
        device_map = _planned(model, device_map, max_memory, no_split_module_classes, said, sizes)
    how = _How(
        strict=strict, rename=rename, progress=progress, quantization=quantization, offload_folder=offload_folder,
    )  # fmt: skip
    report = load_checkpoint_in_model(model, checkpoint, device_map, **kinds, **how)
    return model if device_map is None else dispatch_model(
        model, {**device_map, **dict.fromkeys(report.computed, "cpu")}, offload_dir=offload_folder,
        skip_keys=skip_keys, preload_module_classes=preload_module_classes, mapped=report.mapped,
        dtypes=report.converted_at_use, **shown,
    )  # fmt: skip


class _Dtypes(TypedDict):
    """What tensors become, as a plan and a load take it."""

    dtype: torch.dtype | None
    special_dtypes: Mapping[str, torch.dtype]


class _Shown(TypedDict):
    """Switches of a model that is dispatched."""

    release_pages: bool
    offload_buffers: bool


class _Away(TypedDict):
    """What a plan must know of how weights come and go."""

    offload_buffers: bool
    preload_module_classes: Collection[str]


class _How(TypedDict):
    """How a checkpoint is read, and its weights are packed."""

    strict: bool
    rename: Callable[[str], str | None] | None
    progress: Progress | None
    quantization: Quantization | StoredFP8 | None
    offload_folder: Path | str | None


def _check_early(
    model: nn.Module,
    device_map: Mapping[str, Device] | str | None,
    max_memory: Mapping[Device, int | str] | None,
    whole: str | Collection[str],
    *,
    release_pages: bool,
    offload_buffers: bool,
) -> None:
    """Refuse what cannot be, and what `dispatch_model` would, before anything is loaded."""
    check_release(release_pages)
    for name, asked in (("release_pages", release_pages), ("offload_buffers", offload_buffers)):
        if asked and device_map is None:
            raise ValueError(
                f"{name}=True is for a model that is dispatched, and device_map=None only loads it: leave it out, or "
                f"give device_map, {_WAYS}"
            )
    if device_map is not None and device_map not in get_args(Way):
        check_map(device_map, f", or {_WAYS} to plan one")
    if max_memory is not None:
        if not isinstance(device_map, str):
            raise ValueError(
                f"max_memory={max_memory!r} is for a map that is planned: leave it out, or give device_map {_WAYS}"
            )
        check_places(map(place_of, get_max_memory(max_memory)), "max_memory")
    if dispatched(model):
        raise OffloadedError(
            "the model is dispatched already: call remove_hooks(model) before it is loaded anew"
        )
    units_of(model, (), whole=whole)
    if device_map is not None and not isinstance(device_map, str):
        placements_of(model, device_map)


def _packed_sizes(
    model: nn.Module,
    checkpoint: Path | str,
    quantization: Quantization | StoredFP8 | None,
    kinds: _Dtypes,
) -> Mapping[str, int]:
    """Return the bytes of the weights that a load packs, or keeps packed, by name."""
    if quantization is None:
        return {}
    if isinstance(quantization, StoredFP8):
        return stored_sizes(model, Path(checkpoint))
    return quantized_sizes(model, quantization, **kinds)


def _planned(
    model: nn.Module,
    way: str,
    max_memory: Mapping[Device, int | str] | None,
    no_split: Collection[str],
    said: tuple[_Dtypes, _Away],
    sizes: Mapping[str, int],
) -> DeviceMap:
    """A map that keeps within the budgets."""
    kinds, away = said
    if way != "sequential":
        max_memory = get_balanced_memory(
            model,
            max_memory,
            no_split_module_classes=no_split,
            special_sizes=sizes,
            low_zero=way == "balanced_low_0",
            **kinds,
        )
    return infer_auto_device_map(
        model, max_memory, no_split_module_classes=no_split, special_sizes=sizes, **kinds, **away
    )


def _in_fp32(model: nn.Module, parts: Collection[str]) -> dict[str, torch.dtype]:
    """The floating-point tensors that stay in fp32.

    Raises:
        ValueError: No module is called so.
    """
    found: dict[str, torch.dtype] = {}
    for part in listed(parts):
        names = [
            name
            for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
            if tensor.is_floating_point() and part in name.split(".")[:-1]
        ]
        if not names:
            raise ValueError(
                f"keep_in_fp32_modules={part!r}: the model has no module called so; see named_modules()"
            )
        found.update(dict.fromkeys(names, torch.float32))
    return found
