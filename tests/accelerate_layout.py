"""The files that Accelerate 1.15's `save_state` was seen to write, made without it."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def write_accelerate_state(
    folder: Path,
    *,
    models: Sequence[Mapping[str, Any]] = (),
    optimizers: Sequence[Mapping[str, Any]] = (),
    schedulers: Sequence[Mapping[str, Any]] = (),
    loaders: Sequence[Mapping[str, Any]] = (),
    custom: Sequence[Any] = (),
    scaler: Mapping[str, Any] | None = None,
    world_size: int = 1,
    num_accumulated: int = 0,
    safe: bool = True,
) -> Path:
    """Write state dicts as `save_state` does; generators of rank r are those of `torch.manual_seed(r)`."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, state in enumerate(models):
        end = f"_{number}" if number else ""
        if safe:
            whole = {name: value.clone().contiguous() for name, value in _without_ties(state).items()}
            save_file(whole, folder / f"model{end}.safetensors", {"format": "pt"})
        else:
            torch.save(dict(state), folder / f"pytorch_model{end}.bin")
    for stem, states in (("optimizer", optimizers), ("scheduler", schedulers), ("dl_state_dict", loaders)):
        for number, state in enumerate(states):
            torch.save(dict(state), folder / f"{stem}{f'_{number}' if number else ''}.bin")
    for number, state in enumerate(custom):
        torch.save(state, folder / f"custom_checkpoint_{number}.pkl")
    if scaler is not None:
        torch.save(dict(scaler), folder / "scaler.pt")
    for rank in range(world_size):
        torch.save({"step": num_accumulated, **generators(rank)}, folder / f"random_states_{rank}.pkl")
    return folder


def generators(seed: int) -> dict[str, Any]:
    """The states of generators that were seeded with `seed`, under Accelerate's names."""
    states: dict[str, Any] = {
        "random_state": random.Random(seed).getstate(),
        "torch_manual_seed": torch.Generator().manual_seed(seed).get_state(),
    }
    try:
        import numpy
    except ImportError:
        return states
    return {**states, "numpy_random_seed": numpy.random.RandomState(seed).get_state()}


def _without_ties(state: Mapping[str, Any]) -> dict[str, Any]:
    """The first name of each tensor: safetensors keeps no second one."""
    found: dict[int, str] = {}
    return {name: value for name, value in state.items() if found.setdefault(value.data_ptr(), name) == name}
