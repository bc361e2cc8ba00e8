"""The files of a run in Accelerate's layout: weights, optimizers, schedulers, registered objects and generators."""

import logging
import random
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from safetensors.torch import load_model

from drivetrain_accelerate.object_files import load, save
from drivetrain_accelerate.plugins.constants import (
    MODEL_NAME,
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAFE_MODEL_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
)
from drivetrain_state.collectives.collective_errors import on_each_rank
from drivetrain_weights import MappedFile

if TYPE_CHECKING:
    from drivetrain_accelerate.accelerator.accelerator import Accelerator

logger = logging.getLogger(__name__)


def save_accelerator_state(
    output_dir: str,
    model_states: list[dict[str, Any]],
    optimizers: list[Any],
    schedulers: list[Any],
    dataloaders: list[Any],
    process_index: int,
    step: int,
    scaler: Any = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> Path:
    """Write a run's state. Called on all ranks: each rank writes its generators, the main process the rest.

    The states of `dataloaders` are not written. `save_state` writes the position of each loader.
    """
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    stem, end = (SAFE_MODEL_NAME, "safetensors") if safe_serialization else (MODEL_NAME, "bin")
    for number, state in enumerate(model_states):
        place = numbered_file(folder, stem, number, end)
        save(state, place, save_on_each_node=save_on_each_node, safe_serialization=safe_serialization)
    for name, several in ((OPTIMIZER_NAME, optimizers), (SCHEDULER_NAME, schedulers)):
        for number, each in enumerate(several):
            save(each.state_dict(), numbered_file(folder, name, number), save_on_each_node)
    if scaler is not None:
        save(scaler.state_dict(), folder / SCALER_NAME, save_on_each_node)
    own: dict[str, Any] = {
        "step": step,
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        own["torch_cuda_manual_seed"] = torch.cuda.get_rng_state_all()
    torch.save(own, folder / f"{RNG_STATE_NAME}_{process_index}.pkl")
    return folder


def load_accelerator_state(
    input_dir: str,
    models: list[Any],
    optimizers: list[Any],
    schedulers: list[Any],
    dataloaders: list[Any],
    process_index: int,
    scaler: Any = None,
    map_location: Any = None,
    load_kwargs: dict[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Load the files that `save_accelerator_state` wrote, here or in Accelerate. Called on all ranks.

    The files do not hold the position in the data. Whatever `map_location` is, values are read to the CPU first.

    Returns:
        `step`, the number of micro-batches. A rank without a file for its generators returns an empty dict, warns,
        and leaves its generators as they are.
    """
    if map_location not in (None, "cpu", "on_device"):
        raise ValueError(f"map_location={map_location!r}: say cpu, on_device or None")
    folder, options = Path(input_dir), load_kwargs or {}
    for number, model in enumerate(models):
        safe = numbered_file(folder, SAFE_MODEL_NAME, number, "safetensors")
        if safe.exists():
            MappedFile(safe)  # which checks the file; the library takes the last of two tensors of one name
            load_model(model, safe, **load_model_func_kwargs)
        else:
            weights = load(numbered_file(folder, MODEL_NAME, number), map_location="cpu", **options)
            model.load_state_dict(weights, **load_model_func_kwargs)
    for name, several in ((OPTIMIZER_NAME, optimizers), (SCHEDULER_NAME, schedulers)):
        for number, each in enumerate(several):
            # An optimizer moves its state to its parameters' devices.
            each.load_state_dict(load(numbered_file(folder, name, number), map_location="cpu", **options))
    if scaler is not None:
        scaler.load_state_dict(load(folder / SCALER_NAME))
    generators = folder / f"{RNG_STATE_NAME}_{process_index}.pkl"
    if not generators.is_file():  # as on another number of ranks
        logger.warning(
            "%s is not there: the generators of rank %s go on as they are", generators, process_index
        )
        return {}
    saved: dict[str, Any] = load(generators)
    random.setstate(saved["random_state"])
    np.random.set_state(saved["numpy_random_seed"])
    torch.set_rng_state(saved["torch_manual_seed"])
    on_devices = cast("Sequence[torch.Tensor]", saved.get("torch_cuda_manual_seed") or ())
    if len(on_devices) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(on_devices)
    return {"step": saved.get("step", 0)}


def save_custom_state(obj: Any, path: str, index: int = 0, save_on_each_node: bool = False) -> None:
    """Write the state of a registered object to `custom_checkpoint_INDEX.pkl`, from the main process."""
    save(obj.state_dict(), Path(path) / f"custom_checkpoint_{index}.pkl", save_on_each_node=save_on_each_node)


def load_custom_state(obj: Any, path: str, index: int = 0) -> None:
    """Load the file that `save_custom_state` wrote; refuse values other than tensors and plain values."""
    obj.load_state_dict(load(Path(path) / f"custom_checkpoint_{index}.pkl", map_location="cpu"))


def write_accelerate_layout(accelerator: "Accelerator", output_dir: str | PathLike[str]) -> Path:
    """Write the state of a run into the files that Accelerate's own `load_state` reads. Called on all ranks.

    The files hold the weights, optimizers, schedulers, registered objects and generators. They do not hold the
    position in the data, since Accelerate orders samples differently; `save_state` writes a state that drivetrain
    continues exactly. A RuntimeError says that ranks hold parts of the models.
    """
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


def numbered_file(folder: Path, stem: str, number: int, end: str = "bin") -> Path:
    """Return the file of an object by its number; the name of the first file has no number."""
    return folder / f"{stem}{f'_{number}' if number else ''}.{end}"
