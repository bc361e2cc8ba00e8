"""The part of a loader's data that a process reads, and the seed of its order that all processes agree on."""

from collections.abc import Callable
from typing import Any

import torch

from drivetrain_accelerate.states.partial_state import PartialState
from drivetrain_data import Shard, own_seed
from drivetrain_state import Context, broadcast_object


def part_to_read(
    state: PartialState, process_index: int | None, num_processes: int | None
) -> tuple[Shard, Context | None]:
    """Return the part of the data that a process reads, and the run's context if it is this rank's own part."""
    own = Shard(state.process_index, state.num_processes)
    shard = Shard(
        own.index if process_index is None else process_index,
        own.count if num_processes is None else num_processes,
    )
    # A program may read for other processes than there are.
    return shard, state.context if shard == own else None


def refuse_slicing(slice_fn: Callable[..., Any] | None, argument: str) -> None:
    """Refuse a program's own slicing of batches.

    Args:
        slice_fn: The function; None for drivetrain's slicing.
        argument: The argument that it was given as, for the message.

    Raises:
        ValueError: A function is given.
    """
    if slice_fn is not None:
        raise ValueError(
            f"{argument}=: batches are sliced along dimension 0 of their tensors; "
            "have collate_fn return such batches"
        )


def agreed_seed(loader: Any, data_seed: int | None, context: Context | None) -> int:
    """Return the seed of a loader's order, rank 0's on every rank. Called on all ranks."""
    seed = own_seed(loader)
    if seed is None:
        seed = torch.initial_seed() % 2**63 if data_seed is None else data_seed
    return seed if context is None else broadcast_object(context, seed)
