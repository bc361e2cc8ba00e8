"""Save objects and weights in torch's own format, and load objects without running code from a file.

Weights are written in the layout that `from_pretrained` reads: one file, or several files with an index.
"""

import json
import re
from codecs import encode
from collections.abc import Mapping
from contextlib import nullcontext
from logging import getLogger
from os import PathLike
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from drivetrain_accelerate.plugins.constants import WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from drivetrain_accelerate.states.partial_state import current_context
from drivetrain_checkpoint import write_tensor_file
from drivetrain_checkpoint.export.shard_size import parse_shard_size
from drivetrain_weights.regular_file import check_regular
from drivetrain_weights.torch_records import checked_records

logger = getLogger(__name__)

_OF_AN_EXPORT = re.compile(r"pytorch_model(-\d{5,}-of-\d{5,})?\.bin(\.index\.json)?")
_UNFINISHED = ".tmp"

# What the states of NumPy's generators consist of, which checkpoints hold.
TORCH_SAFE_GLOBALS: list[Any] = [
    np.empty(0).__reduce__()[0],  # NumPy's own function, which has no public name
    np.ndarray,
    encode,
    np.dtype,
    np.dtypes.UInt32DType,
]


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict for safetensors: tensors are contiguous, and of identical tensors only the first is kept.

    Tensors that overlap in memory without being identical are copied.
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

    A WeightFilesError says that the path names no regular file, or, with `mmap`, a file that cannot be mapped.
    """
    if isinstance(f, str | PathLike):
        check_regular(Path(f))
    checked = checked_records(Path(f)) if kwargs.get("mmap") else nullcontext()
    with torch.serialization.safe_globals(TORCH_SAFE_GLOBALS), checked:
        return torch.load(f, map_location=map_location, **{"weights_only": True, **kwargs})


def write_pickled_weights(weights: Mapping[str, Any], folder: Path, *, max_shard_size: int | str) -> None:
    """Write weights as `pytorch_model.bin`, or as `pytorch_model-00001-of-00002.bin` and so on with an index.

    Replace an earlier export in this format once all files are written. The tensors of one file have at most
    `max_shard_size` in all, in bytes or as "10GB".
    """
    shards = plan_shards(weights, parse_shard_size(max_shard_size))
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = {file: folder / f"{file}{_UNFINISHED}" for file in [*shards, WEIGHTS_INDEX_NAME]}
    try:
        for file, names in shards.items():
            torch.save({name: weights[name] for name in names}, unfinished[file])
        if len(shards) > 1:
            stored = {_memory(value): _size_bytes(value) for value in weights.values()}
            index = {
                "metadata": {"total_size": sum(stored.values())},
                "weight_map": {name: file for file, names in shards.items() for name in names},
            }
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            unfinished[WEIGHTS_INDEX_NAME].write_text(text, encoding="utf-8")
        for path in list(folder.iterdir()):
            if _OF_AN_EXPORT.fullmatch(path.name):
                path.unlink()
        for file, path in unfinished.items():
            if path.exists():
                path.replace(folder / file)
    finally:
        for path in unfinished.values():
            path.unlink(missing_ok=True)


def plan_shards(weights: Mapping[str, Any], limit_bytes: int) -> dict[str, list[str]]:
    """Return the names of the weights in each file, by the file's name. Files are filled in the weights' order.

    Weights that share memory go into one file, and the file stores the memory once.
    """
    shards: list[list[str]] = [[]]
    shard_of: dict[Any, list[str]] = {}
    filled = 0
    for name, value in weights.items():
        memory, size_bytes = _memory(value), _size_bytes(value)
        if memory not in shard_of:
            if shards[-1] and filled + size_bytes > limit_bytes:
                shards.append([])
                filled = 0
            shard_of[memory] = shards[-1]
            filled += size_bytes
        shard_of[memory].append(name)
    if len(shards) == 1:
        return {WEIGHTS_NAME: shards[0]}
    stem = Path(WEIGHTS_NAME).stem
    return {f"{stem}-{i:05d}-of-{len(shards):05d}.bin": names for i, names in enumerate(shards, start=1)}


def _memory(value: Any) -> Any:
    """Return a key for a value's memory; values with the same storage have equal keys."""
    if isinstance(value, torch.Tensor) and value.numel() > 0 and value.layout == torch.strided:
        return value.device, value.untyped_storage().data_ptr()
    return id(value)


def _size_bytes(value: Any) -> int:
    return value.nbytes if isinstance(value, torch.Tensor) else 0
