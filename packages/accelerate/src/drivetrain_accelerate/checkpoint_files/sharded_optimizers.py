"""Optimizers of sharded models in Accelerate's files: one whole file, or a folder of parts."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drivetrain.saving.foreign_state import match_optimizer, steps_of
from drivetrain_accelerate.checkpoint_files.divided_files import FULL, layout_of, read_divided, write_divided
from drivetrain_accelerate.object_files import load
from drivetrain_accelerate.plugins.constants import OPTIMIZER_NAME
from drivetrain_accelerate.training.saved_position import take_position, with_position
from drivetrain_backends import Prepared, full_state_dict
from drivetrain_state.collectives.collective_errors import on_main

if TYPE_CHECKING:
    from drivetrain_accelerate.accelerator.accelerator import Accelerator


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: "Accelerator",
    optimizer: Any,
    model: nn.Module,
    output_dir: str,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write an optimizer's state by parameter names. Called on all ranks.

    Args:
        fsdp_plugin: `state_dict_type` says whether the main process writes `optimizer.bin`, or each rank its part in
            the folder `optimizer_0`.
        accelerator: The Accelerator that prepared both.
        optimizer: The prepared optimizer.
        model: The prepared model that it trains.
        output_dir: The folder of the files.
        optimizer_index: The number of the optimizer.
        use_dcp: Not used: parts are always written by torch.distributed.checkpoint.
    """
    del use_dcp
    prepared, context = accelerator.inner.prepared_of(model), accelerator.inner.context
    state = prepared.state_dict()["optimizers"][_place(prepared, optimizer)]
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if layout_of(fsdp_plugin) == FULL:
        whole = with_position(full_state_dict(state, keep=accelerator.is_main_process))
        write = partial(torch.save, whole, folder / _file(optimizer_index))
        on_main(context, write, doing=f"save_fsdp_optimizer() into {folder}")
        return
    write_divided(
        {"optimizer": with_position(state)}, folder / f"{OPTIMIZER_NAME}_{optimizer_index}", context
    )


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
    """Load what `save_fsdp_optimizer` wrote, here or in Accelerate, at any number of ranks. Called on all ranks.

    Args:
        fsdp_plugin: `state_dict_type` says which files to read.
        accelerator: The Accelerator that prepared both.
        optimizer: The prepared optimizer.
        model: The prepared model that it trains.
        input_dir: The folder of the files.
        optimizer_index: The number of the optimizer.
        adapter_only: Not used: the state is of those parameters that the optimizer trains.
        use_dcp: Not used, for the same reason as in saving.

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
        saved = load(folder / _file(optimizer_index), map_location="cpu", mmap=True)
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


def _place(prepared: Prepared, optimizer: Any) -> int:
    """Return which of a model's optimizers one is.

    Raises:
        ValueError: It is none of them.
    """
    wanted = getattr(optimizer, "optimizer", optimizer)
    for place, each in enumerate(prepared.optimizers):
        if each.optimizer is wanted:
            return place
    raise ValueError(
        f"{type(wanted).__name__} does not train this {type(prepared.unwrap()).__name__}: give the prepared "
        "optimizer and the model that it trains"
    )


def _file(number: int) -> str:
    return f"{OPTIMIZER_NAME}{f'_{number}' if number else ''}.bin"
