"""The one file of weights out of those that ranks wrote in parts."""

from pathlib import Path
from shutil import rmtree
from typing import Any, cast

import torch

from drivetrain_accelerate.checkpoint_files.divided_files import read_divided
from drivetrain_accelerate.object_files import clean_state_dict_for_safetensors
from drivetrain_accelerate.plugins.constants import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from drivetrain_accelerate.states.shared_context import current_context
from drivetrain_checkpoint import write_tensor_file
from drivetrain_state.collectives.collective_errors import on_main


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

    def merge() -> None:
        merge_parts(Path(checkpoint_dir), Path(output_path), safe=safe_serialization)
        if remove_checkpoint_dir:
            rmtree(checkpoint_dir)

    on_main(current_context(), merge, doing=f"merge_fsdp_weights({checkpoint_dir})")


def merge_parts(parts: Path, output: Path, *, safe: bool) -> None:
    """Write the weights that ranks wrote in parts as one file, from this process alone.

    Args:
        parts: The folder of parts.
        output: The folder of the file.
        safe: Whether to write safetensors.

    Raises:
        FileNotFoundError: The folder holds no parts; the message names those inside that do.
        StateError: Something in it is no tensor, which safetensors cannot hold.
    """
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
