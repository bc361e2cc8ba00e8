"""The one file of weights out of those that ranks wrote in parts."""

from pathlib import Path
from shutil import rmtree
from typing import Any

import torch

from drivetrain_accelerate.checkpoint_files.divided_files import read_divided
from drivetrain_accelerate.object_files import clean_state_dict_for_safetensors
from drivetrain_accelerate.plugins.constants import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from drivetrain_accelerate.states.shared_context import current_context
from drivetrain_checkpoint import write_tensor_file
from drivetrain_state.collectives import operations


def merge_fsdp_weights(
    checkpoint_dir: str,
    output_path: str,
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Write the weights of a folder such as `pytorch_model_fsdp_0` as one file. Called on all ranks.

    Args:
        checkpoint_dir: The folder of parts.
        output_path: The folder of `model.safetensors`.
        safe_serialization: Whether to write safetensors; if false, `pytorch_model.bin`.
        remove_checkpoint_dir: Whether to delete the parts then.

    Raises:
        FileNotFoundError: The folder holds no parts; the message names those inside that do.
    """
    context = current_context()
    if context.topology.is_main:
        _merge(Path(checkpoint_dir), Path(output_path), safe=safe_serialization)
        if remove_checkpoint_dir:
            rmtree(checkpoint_dir)
    operations.barrier(context)


def _merge(parts: Path, output: Path, *, safe: bool) -> None:
    if not (parts / ".metadata").is_file():
        inside = sorted(each.parent.name for each in parts.glob("*/.metadata"))
        raise FileNotFoundError(
            f"{parts} holds no weights in parts"
            + (f"; say one of its folders: {', '.join(inside)}" if inside else "")
        )
    read: dict[str, Any] = read_divided(parts, None)
    weights: dict[str, Any] = read.get("model", read)
    output.mkdir(parents=True, exist_ok=True)
    if safe:
        write_tensor_file(output / SAFE_WEIGHTS_NAME, clean_state_dict_for_safetensors(weights))
    else:
        torch.save(weights, output / WEIGHTS_NAME)
