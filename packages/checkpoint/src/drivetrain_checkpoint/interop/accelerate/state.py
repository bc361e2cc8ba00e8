"""Read a state saved by Hugging Face Accelerate without running any code in its pickles."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from drivetrain_checkpoint.errors import CorruptCheckpointError, ForeignStateError
from drivetrain_checkpoint.export.export_plan import INDEX
from drivetrain_checkpoint.export.reader import checkpoint_errors, open_export, open_tensor_file
from drivetrain_checkpoint.interop.accelerate.folder import (
    PICKLED_INDEX,
    AccelerateFiles,
    list_accelerate_state,
)
from drivetrain_weights import UnsafePickleError, read_index, read_torch_file

_ACCELERATOR_SEEDS = re.compile(r"torch_(?P<kind>\w+)_manual_seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccelerateState:
    """The content of a state that Accelerate saved, on the CPU, not yet applied to any object.

    Tuples are in the order in which Accelerate prepared or registered the objects.

    Attributes:
        folder: The folder that was read.
        models: The tensors of each model by name, read on access.
        optimizers: The `state_dict()` of each optimizer, whose tensors are memory-mapped from the file.
        schedulers: The `state_dict()` of each scheduler.
        scaler: The loss scale as `{"scale": float, "growth_tracker": int}`; None without one.
        loaders: The state of each stateful data loader.
        custom: The state of each registered object.
        generators: The random number generators of one rank, as `drivetrain_state.load_rng_state` takes them; None if
            they are missing or could not be read.
        num_accumulated: The number of times that the run had entered `accumulate()`; None if unknown.
        world_size: The number of ranks that saved, judged from the files in the folder.
        left_out: The files and entries that were not read, and why.
    """

    folder: Path
    models: tuple[Mapping[str, Any], ...]
    optimizers: tuple[Mapping[str, Any], ...]
    schedulers: tuple[Mapping[str, Any], ...]
    scaler: Mapping[str, float | int] | None
    loaders: tuple[Mapping[str, Any], ...]
    custom: tuple[Any, ...]
    generators: Mapping[str, Any] | None
    num_accumulated: int | None
    world_size: int
    left_out: tuple[str, ...]


def read_accelerate_state(folder: Path | str, *, rank: int = 0, local_rank: int = 0) -> AccelerateState:
    """Read the output of Accelerate's `save_state`.

    `torch.load(weights_only=True)` reads the pickles: they may hold tensors, plain values and NumPy arrays, and no
    code in them runs. Tensors of models and optimizers are read on use; until then the files must not change.

    Args:
        folder: The folder that was given to `save_state`.
        rank: The rank whose random number generators to read.
        local_rank: The index of the accelerator whose generator to take. It counts only if the rank saved several.

    Raises:
        ForeignStateError: A file could run code, or a model or optimizer is sharded; the message names the file and
            a fix.
        CorruptCheckpointError: A file is missing or damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CorruptCheckpointError(
            f"{folder} is no folder: give the folder that Accelerate's save_state wrote"
        )
    files = list_accelerate_state(folder)
    left_out = [f"{path.name}: not known" for path in files.others]
    generators, num_accumulated = _read_generators(files, rank, local_rank, left_out)
    scaler = files.scaler and _read_mapping(files.scaler, "scale", "_growth_tracker")
    return AccelerateState(
        folder=folder,
        models=tuple(_open_model(path) for path in files.models),
        optimizers=tuple(
            _read_mapping(path, "state", "param_groups", mapped=True) for path in files.optimizers
        ),
        schedulers=tuple(_read_mapping(path) for path in files.schedulers),
        scaler=scaler and {"scale": float(scaler["scale"]), "growth_tracker": int(scaler["_growth_tracker"])},
        loaders=tuple(_read_mapping(path) for path in files.loaders),
        custom=tuple(_read_pickle(path) for path in files.custom),
        generators=generators,
        num_accumulated=num_accumulated,
        world_size=max(files.generators, default=-1) + 1,
        left_out=tuple(left_out),
    )


def _open_model(path: Path) -> Mapping[str, Any]:
    if path.name == INDEX:
        return open_export(path.parent)
    if path.name == PICKLED_INDEX:
        with checkpoint_errors():
            files = sorted(set(read_index(path).weight_map.values()))
        shards = [_read_mapping(path.parent / file, mapped=True) for file in files]
        return {name: value for shard in shards for name, value in shard.items()}
    return open_tensor_file(path) if path.suffix == ".safetensors" else _read_mapping(path, mapped=True)


def _read_mapping(path: Path, *keys: str, mapped: bool = False) -> dict[str, Any]:
    value = _read_pickle(path, mapped=mapped)
    if not isinstance(value, Mapping) or not all(key in value for key in keys):
        raise CorruptCheckpointError(
            f"{path} does not hold what its name says: a state with {keys or 'names'}"
        )
    return dict(cast("Mapping[str, Any]", value))


def _read_generators(
    files: AccelerateFiles, rank: int, local_rank: int, left_out: list[str]
) -> tuple[dict[str, Any] | None, int | None]:
    """Read a rank's generators and accumulation count. If that fails, note why in `left_out`: both are optional."""
    path = files.generators.get(rank)
    if path is None:
        return None, None
    try:
        saved = _read_mapping(path)
    except ForeignStateError as error:
        left_out.append(str(error))
        return None, None
    known: dict[str, Any] = {}
    for key, value in saved.items():
        if key == "step":
            continue
        name, convert = _converter(key, local_rank)
        if convert is None:
            left_out.append(f"{path.name}: {key!r} is not known")
        elif value is not None:
            known[name] = convert(value)
    return known, saved.get("step")


def _converter(key: str, local_rank: int) -> tuple[str, Callable[[Any], Any] | None]:
    """Return a generator's name in `load_rng_state` and the conversion of its state; None for an unknown key."""
    if key == "random_state":
        return "python", lambda state: {
            "version": state[0],
            "words": torch.tensor(state[1], dtype=torch.int64),
            "gauss": state[2],
        }
    if key == "numpy_random_seed":
        return "numpy", _numpy_state
    if key == "torch_manual_seed":
        return "torch", lambda state: state
    match = _ACCELERATOR_SEEDS.fullmatch(key)
    if match is None:
        return key, None

    def of_device(states: Any) -> dict[str, Any]:
        # A rank saved the generators of all devices that it saw, or its own alone.
        if not isinstance(states, Tensor):
            states = states[local_rank if local_rank < len(states) else 0]
        return {"kind": match["kind"], "state": states}

    return "accelerator", of_device


def _numpy_state(state: Any) -> dict[str, Any]:
    kind, key, position, has_gauss, gauss = state
    return {
        "bit_generator": kind,
        "key": torch.tensor(key.tolist(), dtype=torch.int64),
        "position": position,
        "has_gauss": has_gauss,
        "gauss": gauss,
    }


def _read_pickle(path: Path, *, mapped: bool = False) -> Any:
    """Read an untrusted file of `torch.save` without running its code. A file that is `mapped` must not change."""
    with checkpoint_errors():
        try:
            return read_torch_file(path, mapped=mapped, arrays=True)
        except UnsafePickleError as error:
            raise ForeignStateError(
                f"{path.name} holds more than tensors and plain values ({error.found}), and reading that could run "
                "code: save those objects as plain values, or remove the file to go on without it"
            ) from error
