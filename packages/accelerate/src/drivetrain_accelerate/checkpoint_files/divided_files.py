"""The files of torch.distributed.checkpoint, of which each rank writes and reads its part; merge them to one."""

import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from drivetrain_accelerate.object_files import clean_state_dict_for_safetensors
from drivetrain_accelerate.plugins.constants import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from drivetrain_accelerate.states.partial_state import current_context
from drivetrain_checkpoint import write_tensor_file
from drivetrain_state import Context
from drivetrain_state.collectives.collective_errors import on_main

FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"


def layout_of(fsdp_plugin: Any) -> str:
    """Return whether a plugin asks for whole files or divided ones; raise a ValueError for neither."""
    said = getattr(fsdp_plugin, "state_dict_type", None) or SHARDED
    name = str(getattr(said, "name", said))
    if name not in (FULL, SHARDED):
        raise ValueError(f"state_dict_type={said}: say {SHARDED} or {FULL}")
    return name


def write_divided(state: Mapping[str, Any], folder: Path, context: Context) -> None:
    """Write a nested state into a folder. Called on all ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    alone = context.topology.world_size == 1
    with _one_process_is_meant():
        dcp.save(dict(state), storage_writer=FileSystemWriter(folder), no_dist=alone)


def read_divided(
    folder: Path, context: Context | None, *, like: Mapping[str, torch.Tensor] | None = None
) -> dict[str, Any]:
    """Read the nested state that a folder holds. Called on all ranks; without a context, in this process alone.

    A folder's list of contents is a pickle, and so are its values that are no tensors: they could run code.

    Args:
        folder: The folder of the parts.
        context: The ranks that read.
        like: Tensors by a part of a value's place, such as a parameter's name, whose division a value of the same
            shape takes; others are read whole.
    """
    if not (folder / ".metadata").is_file():
        raise FileNotFoundError(f"{folder} holds no state in parts (a file .metadata, and *.distcp)")
    metadata = FileSystemReader(folder).read_metadata()
    flat = {name: _room(name, kept, like or {}) for name, kept in metadata.state_dict_metadata.items()}
    alone = context is None or context.topology.world_size == 1
    with _one_process_is_meant():
        dcp.load(flat, storage_reader=FileSystemReader(folder), no_dist=alone)
    tree: dict[Any, Any] = {}
    places: Mapping[str, Any] = metadata.planner_data or {}
    for name, value in flat.items():
        *path, last = places.get(name, (name,))
        inner = tree
        for step in path:
            inner = inner.setdefault(step, {})
        inner[last] = value
    return cast("dict[str, Any]", _with_lists(tree))


def merge_fsdp_weights(
    checkpoint_dir: str,
    output_path: str,
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Write the weights of a folder such as `pytorch_model_fsdp_0` as one file. Called on all ranks.

    Args:
        checkpoint_dir: The folder of parts.
        output_path: The folder of the file.
        safe_serialization: Whether to write `model.safetensors`, not `pytorch_model.bin`.
        remove_checkpoint_dir: Whether to delete the parts then.

    Raises:
        FileNotFoundError: The folder holds no parts; the message names those inside that do.
    """

    def merge() -> None:
        merge_parts(Path(checkpoint_dir), Path(output_path), safe=safe_serialization)
        if remove_checkpoint_dir:
            rmtree(checkpoint_dir)

    on_main(current_context(), merge, doing=f"merge_fsdp_weights({checkpoint_dir})")


def merge_parts(parts: Path, output: Path, *, safe: bool) -> None:
    """Write the weights that ranks wrote in parts as one file, from this process alone; see `merge_fsdp_weights`."""
    if not (parts / ".metadata").is_file():
        inside = sorted(each.parent.name for each in parts.glob("*/.metadata"))
        raise FileNotFoundError(
            f"{parts} holds no weights in parts"
            + (f"; say one of its folders: {', '.join(inside)}" if inside else "")
        )
    read = read_divided(parts, None)
    inner = read.get("model", next(iter(read.values())) if len(read) == 1 else None)
    weights = cast("dict[str, Any]", inner) if isinstance(inner, dict) else read
    output.mkdir(parents=True, exist_ok=True)
    if safe:
        write_tensor_file(output / SAFE_WEIGHTS_NAME, clean_state_dict_for_safetensors(weights))
    else:
        torch.save(weights, output / WEIGHTS_NAME)


@contextmanager
def _one_process_is_meant() -> Generator[None]:
    """Keep torch from warning of a single process, which it takes for a mistake."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
        )
        yield


def _room(name: str, kept: Any, like: Mapping[str, torch.Tensor]) -> Any:
    """Return a tensor to read a value into; None for what is no tensor."""
    if not isinstance(kept, TensorStorageMetadata):
        return None
    dtype = kept.properties.dtype
    for part, tensor in like.items():
        if f".{part}." in f".{name}." and tensor.shape == kept.size:
            return torch.empty_like(tensor.detach(), dtype=dtype)
    return torch.empty(kept.size, dtype=dtype)


def _with_lists(tree: Any) -> Any:
    """Return a tree of dicts with those that are numbered as lists."""
    if not isinstance(tree, dict):
        return tree
    given = cast("dict[Any, Any]", tree)
    found = {key: _with_lists(value) for key, value in given.items()}
    if found and all(isinstance(key, int) for key in found):
        return [found[number] for number in sorted(found)]
    return found
