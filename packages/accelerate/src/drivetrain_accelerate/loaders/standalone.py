"""Functions by which programs prepare a loader without an Accelerator, skip its batches, and find its sampler."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from drivetrain_accelerate.loaders.loader_adapter import DataLoaderAdapter, make_stateful, sharded_of
from drivetrain_accelerate.loaders.prepared_loader import (
    DataLoaderShard,
    choose_kind,
    refuse_slicing,
    shard_for_process,
)
from drivetrain_accelerate.loaders.resume_checks import check_skipped
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
    """Return the loader of one process's part of a loader's data; refuse a slicing function. Called on all ranks.

    `rng_types` and `use_seedable_sampler` change nothing: the order always follows from a seed and the epoch.
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

    After `load_state` a loader goes on where the checkpoint left it, at any number of processes, and comes back as it
    is: programs skip the batches that they have counted themselves. Where a program loads an optimizer's state alone,
    as transformers' Trainer does, its count has to fit what was read.

    Raises:
        DataStateError: The batches have another size than when the optimizer's state was saved, and are not those
            that were read.
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
