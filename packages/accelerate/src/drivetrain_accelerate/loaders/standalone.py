"""Prepare a loader without an Accelerator."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from drivetrain_accelerate.loaders.loader_adapter import DataLoaderAdapter
from drivetrain_accelerate.loaders.prepared_loader import kind_of
from drivetrain_accelerate.loaders.rank_share import agreed_seed, part_to_read, refuse_slicing
from drivetrain_accelerate.loaders.torchdata_loader import as_stateful
from drivetrain_accelerate.plugins.enums import RNGType
from drivetrain_accelerate.states.partial_state import PartialState
from drivetrain_data import shard_loader


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
        slice_fn_for_dispatch: Not supported: batches of any nesting are sliced.
        use_seedable_sampler: Not used: the order always follows from a seed and the epoch.
        data_seed: The seed of that order; None for that of the loader's generator, or torch's.
        non_blocking: Whether to copy pinned batches without waiting.
        use_stateful_dataloader: Whether the loader is torchdata's StatefulDataLoader, and has its state.
        torch_device_mesh: The mesh of the parallel dimensions, of which only data parallel ones are supported.

    Raises:
        ValueError: A slicing function is given, or the batch size is no multiple of the processes that split it.
    """
    del rng_types, use_seedable_sampler, torch_device_mesh
    refuse_slicing(slice_fn_for_dispatch, "prepare_data_loader(slice_fn_for_dispatch")
    if isinstance(dataloader, DataLoaderAdapter):
        return dataloader
    dataloader = as_stateful(dataloader) if use_stateful_dataloader else dataloader
    place = (device or PartialState().device) if put_on_device else None
    shard, context = part_to_read(PartialState(), process_index, num_processes)
    sharded = shard_loader(
        dataloader,
        shard,
        device=place,
        even="pad" if even_batches and shard.count > 1 else "uneven",
        split_batches=split_batches,
        dispatch=dispatch_batches,
        group=None if context is None else context.group,
        seed=agreed_seed(dataloader, data_seed, context),
        compare_samples=False,  # programs for Accelerate build random data without a seed
        non_blocking=non_blocking,
    )
    kind = kind_of(dataloader, sharded, is_dispatched=dispatch_batches, is_placed=put_on_device)
    return kind.over(dataloader, sharded, place)


def get_sampler(dataloader: Any) -> Any:
    """Return the sampler of single indices that a loader's batches are made of; None if it has none."""
    if isinstance(dataloader, DataLoaderAdapter):
        dataloader = dataloader.users_loader
    batches: Any = getattr(dataloader, "batch_sampler", None)
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    return getattr(batches, "sampler", None)
