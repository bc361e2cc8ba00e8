"""Seed the random number generators, and make the ranks' generators equal."""

import importlib
import importlib.util
from collections.abc import Iterable
from typing import Any

import torch

from drivetrain_accelerate.plugins.enums import RNGType
from drivetrain_accelerate.states.partial_state import current_context
from drivetrain_state import set_seed as seed_all
from drivetrain_state.collectives.operations import broadcast_object
from drivetrain_state.detect import device_module


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, NumPy, torch and its accelerators; `device_specific` adds the rank to the seed.

    With `deterministic`, torch uses only deterministic kernels. cuBLAS then requires CUBLAS_WORKSPACE_CONFIG=:4096:8.
    """
    if importlib.util.find_spec("numpy") is not None:  # only generators that are imported are seeded
        importlib.import_module("numpy")
    seed_all(seed + current_context().topology.rank if device_specific else seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_state(rng_type: RNGType | None = None, generator: torch.Generator | None = None) -> None:
    """Copy rank 0's state of a kind of generator, or of `generator`, to all ranks. Called on all ranks."""
    if rng_type is None:
        return
    kind, context = RNGType(rng_type), current_context()
    if kind is RNGType.GENERATOR:
        if generator is None:
            raise ValueError("rng_type='generator': give the generator")
        generator.set_state(broadcast_object(context, generator.get_state()))
        return
    module: Any = device_module(str(kind)) if kind not in (RNGType.TORCH, RNGType.XLA) else None
    if kind is RNGType.TORCH:
        module = torch
    elif kind is RNGType.XLA and importlib.util.find_spec("torch_xla"):
        module = importlib.import_module("torch_xla")
    if module is None:
        raise ValueError(f"rng_type='{kind}': this process has no {kind} device whose generator has a state")
    # A state is a tensor of bytes on the host, or XLA's number.
    module.set_rng_state(broadcast_object(context, module.get_rng_state()))


def synchronize_rng_states(
    rng_types: Iterable[str | RNGType], generator: torch.Generator | None = None
) -> None:
    """Copy rank 0's states of several kinds of generators to all ranks. Called on all ranks."""
    for rng_type in [RNGType(each) for each in ([rng_types] if isinstance(rng_types, str) else rng_types)]:
        synchronize_rng_state(rng_type, generator=generator)
