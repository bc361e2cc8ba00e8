"""A checkpoint straight to where a device map puts it: planned, loaded and dispatched in one call."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import torch
from torch import nn

from drivetrain_dispatch.budget import get_balanced_memory
from drivetrain_dispatch.device_map import Device
from drivetrain_dispatch.dispatching import dispatch_model, dispatched
from drivetrain_dispatch.errors import OffloadedError
from drivetrain_dispatch.filling import Progress
from drivetrain_dispatch.infer import infer_auto_device_map
from drivetrain_dispatch.load import load_checkpoint_in_model
from drivetrain_dispatch.plan import Cost
from drivetrain_dispatch.timeline import Rates

# How a map is planned: spread evenly over the accelerators ("auto" is that), the same with the first one left to what
# generation needs, or one after the other.
Way: TypeAlias = Literal["auto", "balanced", "balanced_low_0", "sequential"]


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: Path | str,
    device_map: Mapping[str, Device] | Way | None = None,
    max_memory: Mapping[Device, int | str] | None = None,
    *,
    no_split_module_classes: Collection[str] = (),
    offload_folder: Path | str | None = None,
    offload_buffers: bool = False,
    dtype: torch.dtype | None = None,
    special_dtypes: Mapping[str, torch.dtype] | None = None,
    keep_in_fp32_modules: Collection[str] = (),
    skip_keys: Collection[str] = (),
    preload_module_classes: Collection[str] = (),
    strict: bool = True,
    rename: Callable[[str], str | None] | None = None,
    rates: Rates | None = None,
    costs: Mapping[str, Cost] | None = None,
    progress: Progress | None = None,
) -> nn.Module:
    """Load a model that may be larger than the accelerator, or the machine, and have it ready to run.

    Each tensor is read once, to where it is kept. What the map keeps on the disk stays in the checkpoint's own files:
    they must stay as they are while the model is used, which is checked at each forward.

    Args:
        model: The model, usually from `init_empty_weights`; changed in place.
        checkpoint: A file of weights, an index of several, or a folder, as `load_checkpoint_in_model` takes it.
        device_map: Device by name; or how to plan one: "auto" and "balanced" spread over the accelerators,
            "balanced_low_0" leaves the first one to what generation needs, "sequential" fills one after the other.
            None loads everything to where the model is.
        max_memory: What a planned map may put where, such as `{0: "20GB", "cpu": "60GB"}`; None takes what is free.
        no_split_module_classes: Names of module classes that a planned map keeps whole.
        offload_folder: For what the map keeps on the disk and no file holds, such as buffers.
        offload_buffers: Whether buffers are kept away from the device that computes too.
        dtype: What floating-point tensors are computed in; None takes the model's dtypes.
        special_dtypes: Dtypes of single tensors by name, which win over `dtype`.
        keep_in_fp32_modules: Parts of names, such as `"norm"`; what is under a module called so is in fp32.
        skip_keys: Keyword arguments of a forward that no device's part of the model moves to itself.
        preload_module_classes: Names of module classes whose weights come all at once.
        strict: Whether the checkpoint must have the model's names and no others.
        rename: From a name of the checkpoint to the model's; None leaves a tensor out.
        rates: How fast weights come, for a planned map; None measures it when something is offloaded.
        costs: What each part does in a forward, for a planned map; see `measure_costs`.
        progress: Called with the bytes that were read and all that are.

    Returns:
        The same model. Its attribute `hf_device_map` is the map, if there is one.

    Raises:
        DeviceMapError: No map keeps within the budgets, or the map does not fit the model or the machine.
        WeightFilesError: A file is missing or damaged.
        WeightsMismatchError: Names or shapes do not fit.
        LoadError: A device has no room.
        OffloadedError: The model is dispatched already.
        ValueError: Another argument is wrong.
    """
    if dispatched(model):
        raise OffloadedError(
            "the model is dispatched already: call remove_hooks(model) before it is loaded anew"
        )
    special = {**_in_fp32(model, keep_in_fp32_modules), **(special_dtypes or {})}
    if isinstance(device_map, str):
        budgets = _budgets(model, device_map, max_memory, no_split_module_classes, dtype, special)
        device_map = infer_auto_device_map(
            model,
            budgets,
            rates=rates,
            no_split_module_classes=no_split_module_classes,
            dtype=dtype,
            special_dtypes=special,
            costs=costs,
        )
    report = load_checkpoint_in_model(
        model,
        checkpoint,
        device_map,
        dtype=dtype,
        special_dtypes=special,
        strict=strict,
        rename=rename,
        progress=progress,
    )
    if device_map is None:
        return model
    return dispatch_model(
        model,
        device_map,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
        skip_keys=skip_keys,
        mapped=report.mapped,
        dtypes=report.converted_at_use,
    )


def _budgets(
    model: nn.Module,
    way: str,
    max_memory: Mapping[Device, int | str] | None,
    no_split: Collection[str],
    dtype: torch.dtype | None,
    special: Mapping[str, torch.dtype],
) -> Mapping[Device, int | str] | None:
    """What a planned map may put where.

    Raises:
        ValueError: There is no such way.
    """
    if way not in get_args(Way):
        raise ValueError(
            f"device_map={way!r}: give a map from names to devices, or one of {', '.join(map(repr, get_args(Way)))}"
        )
    if way == "sequential":
        return max_memory
    return get_balanced_memory(
        model,
        max_memory,
        no_split_module_classes=no_split,
        dtype=dtype,
        special_dtypes=special,
        low_zero=way == "balanced_low_0",
    )


def _in_fp32(model: nn.Module, parts: Collection[str]) -> dict[str, torch.dtype]:
    """The floating-point tensors that stay in fp32.

    Raises:
        ValueError: No module is called so.
    """
    found: dict[str, torch.dtype] = {}
    for part in parts:
        names = [
            name
            for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
            if tensor.is_floating_point() and part in name.split(".")[:-1]
        ]
        if not names:
            raise ValueError(
                f"keep_in_fp32_modules={list(parts)}: the model has no module called {part!r}; see named_modules()"
            )
        found.update(dict.fromkeys(names, torch.float32))
    return found
