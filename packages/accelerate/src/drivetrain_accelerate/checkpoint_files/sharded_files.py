"""Weights and optimizers of sharded models in Accelerate's files: one whole file, or a folder of parts."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drivetrain_accelerate.checkpoint_files.divided_files import FULL, layout_of, read_divided, write_divided
from drivetrain_accelerate.checkpoint_files.run_files import numbered_file
from drivetrain_accelerate.object_files import load
from drivetrain_accelerate.plugins.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from drivetrain_accelerate.training.stepped_optimizer import add_position, take_position
from drivetrain_backends import Prepared, full_model, full_state_dict, load_full_state_dict
from drivetrain_migration.saved_state import match_optimizer, steps_of
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
    """Load what `save_fsdp_model` wrote with these arguments, here or in Accelerate, at any number of ranks.

    Called on all ranks.

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
    del use_dcp
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
    """Load what `save_fsdp_optimizer` wrote with these arguments, here or in Accelerate, at any number of ranks.

    Called on all ranks.

    Raises:
        FileNotFoundError: The folder holds no such files.
        ValueError: They are of another optimizer.
    """
    del adapter_only, use_dcp
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
    """Have the main process write a whole state as one file; if it fails, all ranks do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    on_main(
        accelerator.inner.context, lambda: torch.save(state(), path), doing=f"{call}() into {path.parent}"
    )


def _adapter_names(module: nn.Module, weights: Mapping[str, Any]) -> dict[str, str]:
    """Return the model's name of each adapter weight, by PEFT's name of it in files."""
    from peft import get_peft_model_state_dict

    module_names = {id(value): name for name, value in weights.items()}
    adapters: Mapping[str, Any] = get_peft_model_state_dict(module, state_dict=dict(weights))  # pyright: ignore[reportArgumentType]
    return {name: module_names[id(value)] for name, value in adapters.items() if id(value) in module_names}


def _place(prepared: Prepared, optimizer: Any) -> int:
    """Return which of a model's optimizers one is; raise a ValueError for none."""
    wanted = getattr(optimizer, "optimizer", optimizer)
    for place, each in enumerate(prepared.optimizers):
        if each.optimizer is wanted:
            return place
    raise ValueError(
        f"{type(wanted).__name__} does not train this {type(prepared.unwrap()).__name__}: give the prepared "
        "optimizer and the model that it trains"
    )
