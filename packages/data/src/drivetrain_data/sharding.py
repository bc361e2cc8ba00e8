"""The entrance: a loader in, this shard's loader out."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from drivetrain_data.active import ActiveLoaders
from drivetrain_data.loader import ShardedLoader
from drivetrain_data.settings import DataSettings, Even
from drivetrain_data.shard import Shard
from drivetrain_data.source import BatchSamplerSource, MapSource, Source
from drivetrain_data.stream import StreamSource


def shard_loader(
    loader: DataLoader[Any],
    shard: Shard,
    *,
    device: torch.device | None = None,
    even: Even = "uneven",
    split_batches: bool = False,
    dispatch: bool = False,
    group: ProcessGroup | None = None,
    seed: int = 0,
    non_blocking: bool = True,
    activity: ActiveLoaders | None = None,
    on_batch: Callable[[], None] | None = None,
) -> ShardedLoader[Any]:
    """Shard a DataLoader. Called on all ranks with the same loader.

    Args:
        loader: Any torch DataLoader: map-style or iterable dataset, sampler or batch sampler, batched or not.
        shard: Which reader this is. Ranks that must see the same batches (of one tensor parallel group) share one.
        device: Where tensors are moved; None or a CPU leaves them.
        even: What becomes of an epoch's tail: "uneven" gives each sample once, and a rank without one replays its
            last batch, which `current` tells; "pad" repeats samples; "drop" leaves the incomplete last batches out.
        split_batches: The loader's batch size is that of all shards together, not of one.
        dispatch: Shard 0 reads and sends the others theirs; needs `group`.
        group: The process group of the shards, in their order; used by `dispatch` alone.
        seed: Seed of a shuffled order, which depends on it and the epoch alone.
        non_blocking: Whether copies from pinned memory overlap with computing.
        activity: Is told which loader is being read.
        on_batch: Called for every batch.

    Returns:
        This shard's loader. Every shard's yields equally many batches.

    Raises:
        TypeError: It is no DataLoader.
        DataError: The batch size cannot be split, or the dataset cannot be read as asked.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"shard_loader takes a torch DataLoader, and was given {type(loader).__name__}; wrap a dataset in "
            "DataLoader(dataset, batch_size=...)"
        )
    DataSettings(even=even, split_batches=split_batches, seed=seed)
    source = _source(loader, shard, even=even, split_batches=split_batches, seed=seed)
    if dispatch and shard.count > 1:
        raise NotImplementedError
    return ShardedLoader(
        source,
        dataset=loader.dataset,
        device=device,
        non_blocking=non_blocking,
        activity=activity,
        on_batch=on_batch,
    )


def _source(loader: DataLoader[Any], shard: Shard, *, even: Even, split_batches: bool, seed: int) -> Source:
    if isinstance(loader.dataset, IterableDataset):
        kind = StreamSource
    elif (
        loader.batch_size is None
        and loader.batch_sampler is not None
        and type(loader.batch_sampler) is not BatchSampler
    ):
        kind = BatchSamplerSource
    else:
        kind = MapSource
    return kind(loader, shard, even=even, split_batches=split_batches, seed=seed)
