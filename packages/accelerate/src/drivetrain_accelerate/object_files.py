"""Save objects from one process, and load them without running code that a file holds."""

from codecs import encode
from collections.abc import Mapping
from contextlib import nullcontext
from logging import getLogger
from os import PathLike
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from drivetrain_accelerate.states.partial_state import current_context
from drivetrain_checkpoint import write_tensor_file
from drivetrain_weights.regular_file import check_regular
from drivetrain_weights.torch_records import checked_records

logger = getLogger(__name__)

# What the states of NumPy's generators consist of, which checkpoints hold.
TORCH_SAFE_GLOBALS: list[Any] = [
    np.empty(0).__reduce__()[0],  # NumPy's own function, which has no public name
    np.ndarray,
    encode,
    np.dtype,
    np.dtypes.UInt32DType,
]


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict that safetensors can hold: contiguous, and of tensors that are the same one the first.

    Tensors that only overlap, of which each holds values that the other lacks, are kept, as copies.
    """
    seen: dict[Any, str] = {}
    storages: set[Any] = set()
    kept: dict[str, Any] = {}
    dropped: list[str] = []
    for name, value in state_dict.items():
        if not isinstance(value, torch.Tensor) or value.device.type == "meta" or value.numel() == 0:
            kept[name] = value
            continue
        storage = (value.device, value.untyped_storage().data_ptr())
        view = (storage, value.storage_offset(), value.shape, value.stride(), value.dtype)
        if view in seen:
            dropped.append(name)
            continue
        seen[view] = name
        kept[name] = value.clone() if storage in storages else value.contiguous()
        storages.add(storage)
    if dropped:
        logger.warning(
            "%s: the same tensors under other names were saved; a model that ties them gets them back",
            dropped,
        )
    return kept


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Save an object from the main process, or from the first process of each node; the others return."""
    topology = current_context().topology
    if not (topology.is_local_main if save_on_each_node else topology.is_main):
        return
    if safe_serialization:
        write_tensor_file(f, clean_state_dict_for_safetensors(cast("Mapping[str, Any]", obj)))
    else:
        torch.save(obj, f)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Load an object that `save` wrote in torch's format; classes that could run code are refused.

    Raises:
        WeightFilesError: The path names no regular file, or, with `mmap`, a file that cannot be mapped.
    """
    if isinstance(f, str | PathLike):
        check_regular(Path(f))
    checked = checked_records(Path(f)) if kwargs.get("mmap") else nullcontext()
    with torch.serialization.safe_globals(TORCH_SAFE_GLOBALS), checked:
        return torch.load(f, map_location=map_location, **{"weights_only": True, **kwargs})
