"""Build models without memory, and load checkpoints into a dict, a model, or a model that is dispatched."""

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from drivetrain_accelerate.models.device_maps import infer_auto_device_map, plan_budgets
from drivetrain_accelerate.models.model_dispatch import WeightSources, dispatch_model, remember_sources
from drivetrain_accelerate.models.module_tensors import Where, dtype_of
from drivetrain_dispatch import init_empty_weights as build_empty
from drivetrain_dispatch import init_on_device as build_on_device
from drivetrain_dispatch import load_checkpoint_in_model as load_in_model
from drivetrain_dispatch.model.model_layout import ModelLayout, nearest_entry
from drivetrain_dispatch.planning.device_map import place_of
from drivetrain_weights import MappedFile, read_torch_file

AnyModule = TypeVar("AnyModule", bound=nn.Module)
Folder = str | PathLike[str]
_LOGGER = logging.getLogger(__name__)


def init_empty_weights(include_buffers: bool | None = None) -> AbstractContextManager[None]:
    """Build models in the block with parameters on the meta device."""
    return build_empty(include_buffers=bool(include_buffers))


def init_on_device(device: torch.device, include_buffers: bool | None = None) -> AbstractContextManager[None]:
    """Build models in the block with parameters on a device from the moment they are registered."""
    return build_on_device(device, include_buffers=bool(include_buffers))


def load_state_dict(
    checkpoint_file: Folder, device_map: Mapping[str, Where] | None = None
) -> dict[str, Tensor]:
    """Return the tensors of a weight file, each on its device."""
    path = Path(checkpoint_file)
    if path.suffix != ".safetensors":
        return dict(read_torch_file(path))
    file = MappedFile(path)
    found: dict[str, Tensor] = {}
    for name in file.in_order:
        entry = nearest_entry(name, device_map or {})
        place = "disk" if device_map is None or entry is None else place_of(device_map[entry])
        found[name] = file.tensor(name).to("cpu" if place == "disk" else place)
    return found


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: Folder,
    device_map: dict[str, int | str | torch.device] | None = None,
    offload_folder: Folder | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,  # no weight takes host memory twice
    offload_buffers: bool = False,  # buffers are loaded by the map like parameters
    keep_in_fp32_modules: list[str] | None = None,
    offload_8bit_bnb: bool = False,  # packed weights are offloaded as they are
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load each weight of a model straight to its device; weights for the disk stay in the checkpoint's files.

    The offload options change nothing: no weight takes host memory twice, and the map places buffers as parameters.
    With `broadcast_from_rank0`, all ranks must call the function, and rank 0 reads. A ValueError refuses
    `full_state_dict=False`, and a WeightsMismatchError other names or shapes.
    """
    if not full_state_dict:
        raise ValueError(
            "full_state_dict=False: a sharded checkpoint is loaded by Accelerator.load_state; a full one is read by "
            "each rank for its own shards, whatever this argument"
        )
    in_fp32 = {
        name: torch.float32
        for name, tensor in ModelLayout.of(model).tensors.items()
        if tensor.is_floating_point() and not set(keep_in_fp32_modules or ()).isdisjoint(name.split(".")[:-1])
    }
    report = load_in_model(
        model, Path(checkpoint), device_map, dtype=dtype_of(dtype), strict=strict, special_dtypes=in_fp32,
        read_by="rank 0" if broadcast_from_rank0 else "each",
        offload_folder=None if offload_folder is None else Path(offload_folder),
    )  # fmt: skip
    if report.unexpected:
        _LOGGER.warning(
            "Some weights of %s are not in the model: %s", checkpoint, ", ".join(report.unexpected)
        )
    if report.mapped or report.computed:
        sources = WeightSources(
            mapped=dict(report.mapped), dtypes=dict(report.converted_at_use), in_memory=report.computed
        )
        remember_sources(model, sources)


def load_checkpoint_and_dispatch(
    model: AnyModule,
    checkpoint: Folder,
    device_map: str | dict[str, int | str | torch.device] | None = None,
    max_memory: dict[int | str, int | str] | None = None,
    no_split_module_classes: list[str] | None = None,
    offload_folder: Folder | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> AnyModule:
    """Load and dispatch a model that may be larger than the accelerator or the machine."""
    if isinstance(device_map, str):
        budgets = plan_budgets(device_map, model, max_memory, no_split_module_classes, dtype)
        chosen: Any = infer_auto_device_map(
            model, budgets, no_split_module_classes, dtype, offload_buffers=offload_buffers
        )
    else:
        chosen = device_map
    load_checkpoint_in_model(
        model, checkpoint, chosen, offload_folder, dtype, bool(offload_state_dict), offload_buffers,
        strict=strict, full_state_dict=full_state_dict, broadcast_from_rank0=broadcast_from_rank0,
    )  # fmt: skip
    if chosen is None:
        return model
    return dispatch_model(
        model, chosen, offload_dir=offload_folder, offload_buffers=offload_buffers, skip_keys=skip_keys,
        preload_module_classes=preload_module_classes, force_hooks=force_hooks,
    )  # fmt: skip
