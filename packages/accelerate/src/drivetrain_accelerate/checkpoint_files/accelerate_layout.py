"""Write the state of a run as Accelerate does, for programs that load it with the real package."""

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain_accelerate.checkpoint_files.custom_state import save_custom_state
from drivetrain_accelerate.checkpoint_files.run_files import save_accelerator_state
from drivetrain_state.collectives.collective_errors import on_each_rank

if TYPE_CHECKING:
    from drivetrain_accelerate.accelerator.accelerator import Accelerator


def write_accelerate_layout(accelerator: "Accelerator", output_dir: str | PathLike[str]) -> Path:
    """Write the state of a run into the files that Accelerate's own `load_state` reads. Called on all ranks.

    These are the weights, optimizers, schedulers, registered objects and generators. The place in the data is not
    among them: Accelerate's order of samples is another one. `save_state` writes what drivetrain continues exactly.

    Args:
        accelerator: The Accelerator of the run.
        output_dir: The folder of the files.

    Returns:
        The folder.

    Raises:
        RuntimeError: Ranks hold parts of the models.
        OtherRankFailedError: Another rank could not write.
    """
    _check_whole(accelerator)
    kept = accelerator.saved_objects()
    weights = [accelerator.get_state_dict(model) for model in kept.models]

    def write() -> Path:
        folder = save_accelerator_state(
            str(output_dir),
            weights,
            list(kept.optimizers),
            list(kept.schedulers),
            [],
            accelerator.process_index,
            accelerator.inner.window.begun,
            scaler=accelerator.scaler,
        )
        for number, obj in enumerate(kept.custom):
            save_custom_state(obj, str(folder), number)
        return folder

    return on_each_rank(
        accelerator.inner.context, write, doing=f"write_accelerate_layout() into {output_dir}"
    )


def _check_whole(accelerator: "Accelerator") -> None:
    if accelerator.deepspeed_plugin is not None:
        raise RuntimeError(
            "write_accelerate_layout(): under DeepSpeed, Accelerate loads files of DeepSpeed's own, which drivetrain "
            "does not write: save_model() writes the weights for other programs, and save_state() what drivetrain "
            "continues"
        )
    if accelerator.state.divides_models:
        raise RuntimeError(
            "write_accelerate_layout(): ranks hold parts of the models: call save_fsdp_model() and "
            "save_fsdp_optimizer() of accelerate.utils, which write them in Accelerate's layout"
        )
