"""A prepared loader without the first batches of its epochs."""

import logging
from typing import Any

from drivetrain_accelerate.loaders.loader_adapter import DataLoaderAdapter, sharded_of
from drivetrain_accelerate.loaders.prepared_loader import DataLoaderShard
from drivetrain_accelerate.loaders.resumed_position import check_skipped
from drivetrain_data import ResumedLoaderError, Shard, shard_loader
from drivetrain_data import skip_first_batches as skip_batches_of

logger = logging.getLogger(__name__)


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
