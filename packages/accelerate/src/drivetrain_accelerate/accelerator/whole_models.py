"""The weights of models that are whole on each process, whether or not a run trains them: an average of weights."""

from pathlib import Path

from torch import Tensor, nn

from drivetrain_accelerate.model_structure import extract_model_from_parallel
from drivetrain_backends import strip_wrapper_prefix
from drivetrain_checkpoint import plan_export, write_export
from drivetrain_state import Context
from drivetrain_state.collectives.collective_errors import on_main
from drivetrain_weights import find_ties
from drivetrain_weights.tensor_box import is_dtensor


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's weights and buffers on the CPU by plain names, with the values of offloaded modules."""
    from drivetrain_accelerate.models.align_devices import (
        get_state_dict_offloaded_model,  # few runs ask for it
    )

    state = get_state_dict_offloaded_model(_checked(model))
    return {strip_wrapper_prefix(name): value.detach().cpu() for name, value in state.items()}


def save_whole(context: Context, model: nn.Module, folder: Path, *, max_shard_size: int | str) -> None:
    """Write a model's weights and buffers as safetensors, from the main process. Called on all ranks."""
    inner = _checked(model)

    def write() -> None:
        state = whole_state(inner)
        found = find_ties(inner, rename=strip_wrapper_prefix)
        ties = {name: first for name, first in found.items() if name in state}
        write_export(plan_export(state, max_shard_size=max_shard_size, ties=ties), state.items(), folder)

    on_main(context, write, doing=f"the export into {folder}")


def _checked(model: nn.Module) -> nn.Module:
    """Return the module inside of wrappers, whose parameters are whole."""
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance] a user may give any
        raise TypeError(f"{model!r} is not a model: pass an nn.Module")
    divided = [name for name, each in model.named_parameters() if is_dtensor(each) or hasattr(each, "ds_id")]
    if divided:
        raise ValueError(
            f"{type(model).__name__} has {len(divided)} parameters that are divided among ranks, such as "
            f"{divided[0]}, and this Accelerator did not prepare it, or has forgotten it since: take its weights on "
            "the Accelerator that prepared it, before free_memory() and end_training()"
        )
    return extract_model_from_parallel(model, keep_torch_compile=False)
