"""Weights of sharded models in Accelerate's files: one whole file, or a folder of parts."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drivetrain_accelerate.checkpoint_files.divided_files import FULL, layout_of, read_divided, write_divided
from drivetrain_accelerate.object_files import load
from drivetrain_accelerate.plugins.constants import FSDP_MODEL_NAME
from drivetrain_backends import full_model, load_full_state_dict
from drivetrain_state.collectives.collective_errors import on_main

if TYPE_CHECKING:
    from drivetrain_accelerate.accelerator.accelerator import Accelerator


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

    Args:
        fsdp_plugin: `state_dict_type` says whether the main process writes `pytorch_model_fsdp.bin`, or each rank its
            part in the folder `pytorch_model_fsdp_0`.
        accelerator: The Accelerator that prepared the model.
        model: The prepared model.
        output_dir: The folder of the files.
        model_index: The number of the model.
        adapter_only: Whether to write the adapters alone of a model of PEFT; another model is written whole.
        use_dcp: Not used: parts are always written by torch.distributed.checkpoint.
    """
    del use_dcp
    prepared, context = accelerator.inner.prepared_of(model), accelerator.inner.context
    adapter_only = adapter_only and hasattr(prepared.unwrap(), "peft_config")
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if layout_of(fsdp_plugin) == FULL:
        weights = full_model(prepared, context)

        def write() -> None:
            chosen = _adapters(prepared.unwrap(), weights) if adapter_only else weights
            torch.save(chosen, folder / _file(model_index))

        on_main(context, write, doing=f"save_fsdp_model() into {folder}")
        return
    parts: dict[str, Any] = prepared.state_dict()["model"]
    chosen = _adapters(prepared.unwrap(), parts) if adapter_only else parts
    write_divided({"model": chosen}, folder / f"{FSDP_MODEL_NAME}_{model_index}", context)


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: "Accelerator",
    model: nn.Module,
    input_dir: str,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load what `save_fsdp_model` wrote, here or in Accelerate, at any number of ranks. Called on all ranks.

    Args:
        fsdp_plugin: `state_dict_type` says which files to read.
        accelerator: The Accelerator that prepared the model.
        model: The prepared model.
        input_dir: The folder of the files.
        model_index: The number of the model.
        adapter_only: Whether the files hold the adapters alone if the model is one of PEFT.
        use_dcp: Not used, for the same reason as in saving.

    Raises:
        FileNotFoundError: The folder holds no such files.
        ValueError: They are of another model.
    """
    del use_dcp
    prepared, context = accelerator.inner.prepared_of(model), accelerator.inner.context
    adapter_only = adapter_only and hasattr(prepared.unwrap(), "peft_config")
    own: dict[str, Any] = prepared.state_dict()["model"]
    renamed = _adapter_names(prepared.unwrap(), own) if adapter_only else {name: name for name in own}
    if layout_of(fsdp_plugin) == FULL:
        read: dict[str, Tensor] | None = None
        if accelerator.is_main_process:
            read = load(Path(input_dir) / _file(model_index), map_location="cpu", mmap=True)
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


def _file(number: int) -> str:
    return f"{FSDP_MODEL_NAME}{f'_{number}' if number else ''}.bin"


def _adapters(module: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the adapters among weights, under the names that PEFT stores them by."""
    return {name: weights[inside] for name, inside in _adapter_names(module, weights).items()}


def _adapter_names(module: nn.Module, weights: Mapping[str, Any]) -> dict[str, str]:
    """Return the model's name of each adapter weight, by PEFT's name of it in files."""
    from peft import get_peft_model_state_dict

    module_names = {id(value): name for name, value in weights.items()}
    adapters: Mapping[str, Any] = get_peft_model_state_dict(module, state_dict=dict(weights))  # pyright: ignore[reportArgumentType]
    return {name: module_names[id(value)] for name, value in adapters.items() if id(value) in module_names}
