"""Prepare a loader without an Accelerator."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from drivetrain_accelerate.loaders.prepared_loader import (
    DataLoaderAdapter,
    DataLoaderDispatcher,
    DataLoaderShard,
)
from drivetrain_accelerate.plugins.enums import RNGType
from drivetrain_accelerate.states.partial_state import PartialState
from drivetrain_data import Shard, own_seed, shard_loader
from drivetrain_state import Context, broadcast_object


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: list[str | RNGType] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> DataLoader[Any]:
    """Return the loader of one process's part of a loader's data. Called on all ranks.

    Args:
        dataloader: The loader as the program built it.
        device: The device to copy batches to, with `put_on_device`; None for that of this process.
        num_processes: The number of processes; None for the ranks of the run.
        process_index: The number of the process; None for this rank.
        split_batches: Whether the loader's batch size is the sum over processes.
        put_on_device: Whether to copy batches to the device.
        rng_types: Not used: the order needs no generator to be synchronised.
        dispatch_batches: Whether the main process reads for all; None: for data without indices.
        even_batches: Whether the tail is filled with repeats.
        slice_fn_for_dispatch: Not supported: drivetrain slices batches of any nesting.
        use_seedable_sampler: Not used: the order always follows from a seed and the epoch.
        data_seed: The seed of that order; None for that of the loader's generator, or torch's.
        non_blocking: Whether to copy pinned batches without waiting.
        use_stateful_dataloader: Not used: the loader always has `state_dict`.
        torch_device_mesh: The mesh of the parallel dimensions, of which only data parallel ones are supported.

    Raises:
        ValueError: A slicing function is given, or the batch size is no multiple of the processes that split it.
    """
    del rng_types, use_seedable_sampler, use_stateful_dataloader, torch_device_mesh
    _refuse_slicing(slice_fn_for_dispatch)
    if isinstance(dataloader, DataLoaderAdapter):
        return dataloader
    state = PartialState()
    shard, context = _part_to_read(state, process_index, num_processes)
    sharded = shard_loader(
        dataloader,
        shard,
        device=(device or state.device) if put_on_device else None,
        even="pad" if even_batches and shard.count > 1 else "uneven",
        split_batches=split_batches,
        dispatch=dispatch_batches,
        group=None if context is None else context.group,
        seed=_seed(dataloader, data_seed, context),
        non_blocking=non_blocking,
    )
    kind = DataLoaderDispatcher if dispatch_batches else DataLoaderShard
    return kind.over(dataloader, sharded)


def get_sampler(dataloader: Any) -> Any:
    """Return the sampler of single indices that a loader's batches are made of; None if it has none."""
    if isinstance(dataloader, DataLoaderAdapter):
        dataloader = dataloader.base_dataloader
    batches: Any = getattr(dataloader, "batch_sampler", None)
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    return getattr(batches, "sampler", None)


def _part_to_read(
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


def _refuse_slicing(slice_fn: Callable[..., Any] | None) -> None:
    if slice_fn is not None:
        raise ValueError(
            "prepare_data_loader(slice_fn_for_dispatch=): batches are sliced along dimension 0 of their tensors; "
            "have collate_fn return such batches"
        )


def _seed(loader: Any, data_seed: int | None, context: Context | None) -> int:
    """Return the seed of a loader's order, rank 0's on every rank. Called on all ranks."""
    seed = own_seed(loader)
    if seed is None:
        seed = torch.initial_seed() % 2**63 if data_seed is None else data_seed
    return seed if context is None else broadcast_object(context, seed)
