"""Plan a device map from the sizes of a model and the memory of the devices; check and shorten device maps."""

import logging
import warnings
from collections.abc import Collection, Iterator

import torch
from torch import nn

from drivetrain_accelerate.models.module_sizes import convert_file_size_to_int, planned_sizes
from drivetrain_accelerate.models.module_tensors import Where
from drivetrain_dispatch import DeviceMap, DeviceMapError
from drivetrain_dispatch import get_max_memory as memory_budgets
from drivetrain_dispatch.model.model_layout import ModelLayout, listed, nearest_entry
from drivetrain_dispatch.planning.blocks import blocks_of
from drivetrain_dispatch.planning.infer_device_map import plan_device_map, stored_map
from drivetrain_dispatch.planning.memory_budget import balanced_budgets

_LOGGER = logging.getLogger(__name__)
_WAYS = ("auto", "balanced", "balanced_low_0", "sequential")
_LAST = ("mps", "cpu", "disk")  # behind the accelerators, in this order


def get_max_memory(max_memory: dict[int | str, int | str] | None = None) -> dict[int | str, int]:
    """Return the memory budget of each device in bytes, accelerators first; by default 95 % of the free memory.

    Sizes such as "5GB" in `max_memory` are replaced by bytes, since transformers relies on the change.
    """
    if max_memory is None:
        free = memory_budgets()
        return {device: size for device, size in free.items() if isinstance(device, int | str)}
    for device, size in max_memory.items():
        max_memory[device] = convert_file_size_to_int(size) if isinstance(size, str) else size
    sizes = {device: int(size) for device, size in max_memory.items()}
    behind = {device: sizes[device] for device in _LAST if device in sizes}
    numbered = sorted(device for device in sizes if isinstance(device, int))
    named = [device for device in sizes if isinstance(device, str) and device not in behind]
    return {**{device: sizes[device] for device in (*numbered, *named)}, **behind}


def get_balanced_memory(
    model: nn.Module,
    max_memory: dict[int | str, int | str] | None = None,
    no_split_module_classes: list[str] | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: dict[str, str | torch.device] | None = None,
    low_zero: bool = False,
) -> dict[int | str, int]:
    """Return memory budgets that spread a model evenly over the accelerators."""
    budgets = get_max_memory(max_memory)
    plain, sizes = planned_sizes(model, dtype, special_dtypes)
    layout = ModelLayout.of(model, dtype=plain, special_sizes=sizes)
    blocks = blocks_of(layout, no_split=present_classes(model, no_split_module_classes))
    found = balanced_budgets({**budgets}, blocks, low_zero=low_zero)
    return {device: found[device] for device in budgets}


def present_classes(model: nn.Module, classes: str | Collection[str] | None) -> list[str]:
    """Return the named classes that the model has modules of; libraries also name classes of related models."""
    return sorted({*listed(classes or ())} & {type(module).__name__ for module in model.modules()})


def infer_auto_device_map(
    model: nn.Module,
    max_memory: dict[int | str, int | str] | None = None,
    no_split_module_classes: list[str] | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: dict[str, str | torch.dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,  # the plan finds whatever fits by itself
) -> dict[str, Where]:
    """Plan where each part of a model goes. Nothing is moved or loaded.

    If no plan keeps the budgets during a forward, a warning says so, and the plan keeps them between forwards only. A
    DeviceMapError says that the disk's budget is too small for the rest.
    """
    plain, sizes = planned_sizes(model, dtype, special_dtypes)
    budgets = get_max_memory(max_memory)
    whole = present_classes(model, no_split_module_classes)
    layout = ModelLayout.of(model, dtype=plain, special_sizes=sizes)
    blocks = blocks_of(layout, no_split=whole, offload_buffers=offload_buffers)
    try:
        planned = plan_device_map(blocks, {**budgets}, converts=layout.converts)
    except DeviceMapError as error:
        stored = stored_map(blocks, {**budgets})
        if stored is None:
            raise
        _LOGGER.warning("%s. The map that follows keeps the budgets between forwards alone", error)
        planned = stored
    if verbose:
        _LOGGER.info("%s", planned)
    if clean_result:
        return planned
    entries = {name: nearest_entry(name, planned) for name in _list_parts(model, "", whole)}
    chosen = {name: planned[entry] for name, entry in entries.items() if entry is not None}
    return DeviceMap(chosen, window_bytes=planned.window_bytes, rates=planned.rates)


def plan_budgets(
    way: str,
    model: nn.Module,
    max_memory: dict[int | str, int | str] | None,
    no_split_module_classes: list[str] | None,
    dtype: str | torch.dtype | None = None,
) -> dict[int | str, int | str]:
    """Return the budgets for a planned map; `way` is a word such as "balanced" or "sequential"."""
    if way not in _WAYS:
        raise ValueError(f"device_map={way!r}: give a map, or one of {', '.join(map(repr, _WAYS))}")
    if way == "sequential":
        return {**get_max_memory(max_memory)}
    low_zero = way == "balanced_low_0"
    return {**get_balanced_memory(model, max_memory, no_split_module_classes, dtype, low_zero=low_zero)}


def _list_parts(module: nn.Module, name: str, whole: Collection[str]) -> Iterator[str]:
    """Yield the names of modules that are not divided, and of the tensors outside such modules."""
    children = list(module.named_children())
    if name and (not children or type(module).__name__ in whole):
        yield name
        return
    prefix = f"{name}." if name else ""
    for own, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        yield prefix + own
    for inner, child in children:
        yield from _list_parts(child, prefix + inner, whole)


def check_device_map(model: nn.Module, device_map: dict[str, str | int | torch.device]) -> None:
    """Refuse a map in which a parameter or buffer has no device; warn of names that the model lacks."""
    tensors = [name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())]
    known = {*tensors, *(name for name, _ in model.named_modules(remove_duplicate=False))}
    if unknown := [name for name in device_map if name not in known]:
        warnings.warn(f"device_map names {unknown}, which the model does not have", stacklevel=2)
    if left := [name for name in tensors if nearest_entry(name, device_map) is None]:
        raise ValueError(
            f'device_map gives no device for {", ".join(left)}: name them or a module around them; "" covers the rest'
        )


def clean_device_map(
    device_map: dict[str, int | str | torch.device], module_name: str = ""
) -> dict[str, int | str | torch.device]:
    """Replace the entries of a module's parts by one entry if all parts are on one device."""
    prefix = f"{module_name}." if module_name else ""
    inside = [name for name in device_map if name.startswith(prefix)]
    devices = {device_map[name] for name in inside}
    if len(devices) == 1 and len(inside) > 1:
        for name in inside:
            del device_map[name]
        device_map[module_name] = devices.pop()
        return device_map
    for child in sorted(
        {prefix + name.removeprefix(prefix).partition(".")[0] for name in inside} - {module_name}
    ):
        if any(name.startswith(f"{child}.") for name in inside):
            clean_device_map(device_map, child)
    return device_map
