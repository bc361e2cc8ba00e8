"""Functions by which programs prepare a loader without an Accelerator, skip its batches, and find its sampler."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from drivetrain_accelerate.loaders.loader_adapter import DataLoaderAdapter, sharded_of
from drivetrain_accelerate.loaders.prepared_loader import (
    DataLoaderShard,
    choose_kind,
    refuse_slicing,
    shard_for_process,
)
from drivetrain_accelerate.loaders.resume_checks import check_skipped
from drivetrain_accelerate.loaders.torchdata_loader import make_stateful
from drivetrain_accelerate.plugins.enums import RNGType
from drivetrain_accelerate.states.partial_state import PartialState
from drivetrain_data import ResumedLoaderError, Shard, shard_loader
from drivetrain_data import skip_first_batches as skip_batches_of

logger = logging.getLogger(__name__)


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
    dataloader = make_stateful(dataloader) if use_stateful_dataloader else dataloader
    place = (device or PartialState().device) if put_on_device else None
    sharded = shard_for_process(
        dataloader,
        process_index,
        num_processes,
        device=place,
        even="pad" if even_batches else "uneven",
        split_batches=split_batches,
        dispatch=dispatch_batches,
        non_blocking=non_blocking,
        data_seed=data_seed,
    )
    kind = choose_kind(dataloader, sharded, is_dispatched=dispatch_batches, is_placed=put_on_device)
    return kind.over(dataloader, sharded, place)


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Return a prepared loader that leaves out the first batches of its epochs, without reading them.

    After `load_state` a loader goes on where the checkpoint left it, at any number of processes. Programs skip the
    batches that they have counted themselves: that loader comes back as it is. Where a program loads an optimizer's
    state alone, as transformers' Trainer does, what it counts has to fit what was read.

    Args:
        dataloader: A prepared loader, or a DataLoader, which is then read by this process alone.
        num_batches: The number of batches to leave out on this process.

    Raises:
        DataStateError: The batches have become larger or smaller since the optimizer's state was saved, and are
            not those that were read.
    """
    if not isinstance(dataloader, DataLoaderAdapter):
        dataloader = DataLoaderShard.over(dataloader, shard_loader(dataloader, Shard(0, 1)))
    try:
        skipping = skip_batches_of(dataloader.sharded, num_batches)
    except ResumedLoaderError:
        logger.info("skip_first_batches(%d): the loader goes on where the checkpoint left it", num_batches)
        return dataloader
    check_skipped(sharded_of(dataloader.sharded), num_batches)
    rest = type(dataloader).over(dataloader.users_loader, skipping, dataloader.device)
    rest.iteration = dataloader.iteration
    return rest


def get_sampler(dataloader: Any) -> Any:
    """Return the sampler of single indices that a loader's batches are made of; None if it has none."""
    if isinstance(dataloader, DataLoaderAdapter):
        dataloader = dataloader.users_loader
    batches: Any = getattr(dataloader, "batch_sampler", None)
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    return getattr(batches, "sampler", None)
