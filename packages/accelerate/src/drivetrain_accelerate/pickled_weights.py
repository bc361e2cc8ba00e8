"""Weights in torch's own format, as `from_pretrained` reads them: one file, or several with an index."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from drivetrain_accelerate.plugins.constants import WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from drivetrain_checkpoint.export.export_plan import parse_shard_size

_OF_AN_EXPORT = re.compile(r"pytorch_model(-\d{5,}-of-\d{5,})?\.bin(\.index\.json)?")
_UNFINISHED = ".tmp"


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
    """Return the names of the weights in each file, by its name; files are filled in the order of the weights.

    Names of the same memory stand in one file, which stores it once.
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
    """Return what tells apart values that are stored by themselves."""
    if isinstance(value, torch.Tensor) and value.numel() > 0 and value.layout == torch.strided:
        return value.device, value.untyped_storage().data_ptr()
    return id(value)


def _size_bytes(value: Any) -> int:
    return value.nbytes if isinstance(value, torch.Tensor) else 0
