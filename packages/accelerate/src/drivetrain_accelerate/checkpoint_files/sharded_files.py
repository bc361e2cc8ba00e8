"""Weights and optimizers of sharded models in Accelerate's files: one whole file, or a folder of parts.

The parts are files of torch.distributed.checkpoint. Each rank writes and reads its own parts.
"""

import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from drivetrain_accelerate.checkpoint_files.run_files import numbered_file
from drivetrain_accelerate.object_files import clean_state_dict_for_safetensors, load
from drivetrain_accelerate.plugins.constants import (
    FSDP_MODEL_NAME,
    OPTIMIZER_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_NAME,
)
from drivetrain_accelerate.states.partial_state import current_context
from drivetrain_accelerate.training.stepped_optimizer import add_position, take_position
from drivetrain_backends import Prepared, full_model, full_state_dict, load_full_state_dict
from drivetrain_checkpoint import write_tensor_file
from drivetrain_migration.saved_state import match_optimizer, steps_of
from drivetrain_state import Context
from drivetrain_state.collectives.collective_errors import on_main

if TYPE_CHECKING:
    from drivetrain_accelerate.accelerator.accelerator import Accelerator

FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: "Accelerator",
    model: nn.Module,
    output_dir: str,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write a model's weights. Called on all ranks.

    The plugin's `state_dict_type` says whether the main process writes `pytorch_model_fsdp.bin`, or each rank its
    part in the folder `pytorch_model_fsdp_0`. With `adapter_only`, only the adapters of a PEFT model are written.
    `use_dcp` changes nothing: parts are always written by torch.distributed.checkpoint.
    """
    prepared, context = accelerator.inner.prepared_of(model), accelerator.inner.context
    inner = prepared.unwrap()
    adapter_only = adapter_only and hasattr(inner, "peft_config")

    def chosen(weights: Mapping[str, Any]) -> Mapping[str, Any]:
        if not adapter_only:
            return weights
        return {name: weights[inside] for name, inside in _adapter_names(inner, weights).items()}

    if layout_of(fsdp_plugin) == FULL:
        weights = full_model(prepared, context)
        path = numbered_file(Path(output_dir), FSDP_MODEL_NAME, model_index)
        _write_full(accelerator, lambda: chosen(weights), path, call="save_fsdp_model")
    else:
        parts = {"model": chosen(prepared.state_dict()["model"])}
        write_divided(parts, Path(output_dir) / f"{FSDP_MODEL_NAME}_{model_index}", context)


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: "Accelerator",
    model: nn.Module,
    input_dir: str,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load weights that `save_fsdp_model` (also Accelerate's) wrote with these arguments on any number of ranks.

    Called on all ranks. Missing files raise a FileNotFoundError, and files of another model a ValueError.
    """
    prepared, context = accelerator.inner.prepared_of(model), accelerator.inner.context
    adapter_only = adapter_only and hasattr(prepared.unwrap(), "peft_config")
    own: dict[str, Any] = prepared.state_dict()["model"]
    renamed = _adapter_names(prepared.unwrap(), own) if adapter_only else {name: name for name in own}
    if layout_of(fsdp_plugin) == FULL:
        read: dict[str, Tensor] | None = None
        if accelerator.is_main_process:
            path = numbered_file(Path(input_dir), FSDP_MODEL_NAME, model_index)
            read = load(path, map_location="cpu", mmap=True)
        if adapter_only:
            whole = full_model(prepared, context)
            read = None if read is None else {**whole, **{renamed[name]: each for name, each in read.items()}}
        load_full_state_dict(prepared, read, context)
        return
    like = {name: own[inside] for name, inside in renamed.items() if isinstance(own[inside], Tensor)}
    found = read_divided(Path(input_dir) / f"{FSDP_MODEL_NAME}_{model_index}", context, like=like)["model"]
    state = prepared.state_dict()
    state["model"] = {
        **(own if adapter_only else {}),
        **{renamed.get(name, name): found[name] for name in found},
    }
    prepared.load_state_dict(state)


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: "Accelerator",
    optimizer: Any,
    model: nn.Module,
    output_dir: str,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write the state of a model's optimizer by parameter names. Called on all ranks.

    `fsdp_plugin.state_dict_type` says whether the main process writes `optimizer.bin`, or each rank its part in the
    folder `optimizer_0`; the other arguments are as in `save_fsdp_model`.
    """
    prepared, context = accelerator.inner.prepared_of(model), accelerator.inner.context
    state = prepared.state_dict()["optimizers"][_place(prepared, optimizer)]
    if layout_of(fsdp_plugin) == FULL:
        whole = add_position(full_state_dict(state, keep=accelerator.is_main_process))
        path = numbered_file(Path(output_dir), OPTIMIZER_NAME, optimizer_index)
        _write_full(accelerator, lambda: whole, path, call="save_fsdp_optimizer")
    else:
        parts = {"optimizer": add_position(state)}
        write_divided(parts, Path(output_dir) / f"{OPTIMIZER_NAME}_{optimizer_index}", context)


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: "Accelerator",
    optimizer: Any,
    model: nn.Module,
    input_dir: str,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load a state that `save_fsdp_optimizer` (also Accelerate's) wrote with these arguments on any number of ranks.

    Called on all ranks. Missing files raise a FileNotFoundError, and files of another optimizer a ValueError.
    """
    prepared, context = accelerator.inner.prepared_of(model), accelerator.inner.context
    state = prepared.state_dict()
    model_state: Mapping[str, Any] = state["model"]
    own = {name: each for name, each in model_state.items() if isinstance(each, Tensor)}
    place, folder = _place(prepared, optimizer), Path(input_dir)
    if layout_of(fsdp_plugin) == FULL:
        path = numbered_file(folder, OPTIMIZER_NAME, optimizer_index)
        saved = load(path, map_location="cpu", mmap=True)
    else:
        saved = read_divided(folder / f"{OPTIMIZER_NAME}_{optimizer_index}", context, like=own)["optimizer"]
    matched = match_optimizer(
        take_position(saved),
        state["optimizers"][place]["param_groups"],
        shapes={name: tuple(each.shape) for name, each in own.items()},
        kind=type(getattr(optimizer, "optimizer", optimizer)).__name__,
        clone=context.device.type == "cpu",
    )
    state["optimizers"][place] = matched
    state["num_steps"][place] = steps_of(matched) or 0
    prepared.load_state_dict(state)


def _write_full(accelerator: "Accelerator", state: Callable[[], Any], path: Path, *, call: str) -> None:
    """Write a whole state as one file, from the main process. If the write fails, all ranks raise an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    on_main(
        accelerator.inner.context, lambda: torch.save(state(), path), doing=f"{call}() into {path.parent}"
    )


def _adapter_names(module: nn.Module, weights: Mapping[str, Any]) -> dict[str, str]:
    """Return the name of each adapter weight in the model, by the name that PEFT gives it in files."""
    from peft import get_peft_model_state_dict

    module_names = {id(value): name for name, value in weights.items()}
    adapters: Mapping[str, Any] = get_peft_model_state_dict(module, state_dict=dict(weights))  # pyright: ignore[reportArgumentType]
    return {name: module_names[id(value)] for name, value in adapters.items() if id(value) in module_names}


def _place(prepared: Prepared, optimizer: Any) -> int:
    """Return the number of an optimizer among a model's optimizers; raise a ValueError if it is none of them."""
    wanted = getattr(optimizer, "optimizer", optimizer)
    for place, each in enumerate(prepared.optimizers):
        if each.optimizer is wanted:
            return place
    raise ValueError(
        f"{type(wanted).__name__} does not train this {type(prepared.unwrap()).__name__}: give the prepared "
        "optimizer and the model that it trains"
    )


def layout_of(fsdp_plugin: Any) -> str:
    """Return the layout that a plugin asks for, whole or divided; raise a ValueError for another layout."""
    said = getattr(fsdp_plugin, "state_dict_type", None) or SHARDED
    name = str(getattr(said, "name", said))
    if name not in (FULL, SHARDED):
        raise ValueError(f"state_dict_type={said}: say {SHARDED} or {FULL}")
    return name


def write_divided(state: Mapping[str, Any], folder: Path, context: Context) -> None:
    """Write a nested state into a folder. Called on all ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    alone = context.topology.world_size == 1
    with _allow_one_process():
        dcp.save(dict(state), storage_writer=FileSystemWriter(folder), no_dist=alone)


def read_divided(
    folder: Path, context: Context | None, *, like: Mapping[str, torch.Tensor] | None = None
) -> dict[str, Any]:
    """Read a folder's nested state. Called on all ranks, or with `context=None` in a single process.

    A folder's list of contents and its values other than tensors are pickles, which could run code. `like` has
    tensors by name. A value with such a name in its path, and the same shape, is divided among ranks as that tensor.
    Other values are read whole.
    """
    if not (folder / ".metadata").is_file():
        raise FileNotFoundError(f"{folder} holds no state in parts (a file .metadata, and *.distcp)")
    metadata = FileSystemReader(folder).read_metadata()
    flat = {
        name: _allocate_target(name, kept, like or {}) for name, kept in metadata.state_dict_metadata.items()
    }
    alone = context is None or context.topology.world_size == 1
    with _allow_one_process():
        dcp.load(flat, storage_reader=FileSystemReader(folder), no_dist=alone)
    tree: dict[Any, Any] = {}
    places: Mapping[str, Any] = metadata.planner_data or {}
    for name, value in flat.items():
        *path, last = places.get(name, (name,))
        inner = tree
        for step in path:
            inner = inner.setdefault(step, {})
        inner[last] = value
    return cast("dict[str, Any]", _restore_lists(tree))


def merge_fsdp_weights(
    checkpoint_dir: str,
    output_path: str,
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Write the weights of a folder of parts, such as `pytorch_model_fsdp_0`, as one file. Called on all ranks.

    If the folder holds no parts, a FileNotFoundError names the subfolders that hold parts.
    """

    def merge() -> None:
        merge_parts(Path(checkpoint_dir), Path(output_path), safe=safe_serialization)
        if remove_checkpoint_dir:
            rmtree(checkpoint_dir)

    on_main(current_context(), merge, doing=f"merge_fsdp_weights({checkpoint_dir})")


def merge_parts(parts: Path, output: Path, *, safe: bool) -> None:
    """Join the parts of weights to one file, in this process alone; see `merge_fsdp_weights`."""
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
def _allow_one_process() -> Generator[None]:
    """Suppress torch's warning that the process group is not initialized."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
        )
        yield


def _allocate_target(name: str, kept: Any, like: Mapping[str, torch.Tensor]) -> Any:
    """Return an empty tensor to read a value into; None if the value is no tensor."""
    if not isinstance(kept, TensorStorageMetadata):
        return None
    dtype = kept.properties.dtype
    for part, tensor in like.items():
        if f".{part}." in f".{name}." and tensor.shape == kept.size:
            return torch.empty_like(tensor.detach(), dtype=dtype)
    return torch.empty(kept.size, dtype=dtype)


def _restore_lists(tree: Any) -> Any:
    """Return nested dicts with each dict whose keys are integers turned into a list."""
    if not isinstance(tree, dict):
        return tree
    given = cast("dict[Any, Any]", tree)
    found = {key: _restore_lists(value) for key, value in given.items()}
    if found and all(isinstance(key, int) for key in found):
        return [found[number] for number in sorted(found)]
    return found
