"""The DataLoader that a prepared loader shows: that of one process, which makes its batches of the program's."""

from typing import Any

from torch.utils.data import IterableDataset

from drivetrain_accelerate.loaders.batch_shards import BatchSamplerShard, SkipBatchSampler
from drivetrain_data import ShardedLoader
from drivetrain_data.skipping_view import SkippedBatches
from drivetrain_data.sources.torch_loader import is_stock, rebuild


def shown_loader(loader: Any, sharded: ShardedLoader[Any] | SkippedBatches[Any]) -> Any:
    """Return the loader whose attributes a prepared loader has; nothing is read by it.

    Args:
        loader: The loader as the program built it; it is shown itself where it has no batches of indices.
        sharded: The loader of this process's batches.
    """
    batches: Any = getattr(loader, "batch_sampler", None)
    if not is_stock(loader) or isinstance(loader.dataset, IterableDataset) or batches is None:
        return loader
    whole = sharded.loader if isinstance(sharded, SkippedBatches) else sharded
    if whole.shard.count > 1 and not whole.is_dispatched:
        batches = BatchSamplerShard(
            batches, whole.shard.count, whole.shard.index, whole.splits_batches, whole.even != "uneven"
        )
    if isinstance(sharded, SkippedBatches):
        batches = SkipBatchSampler(batches, sharded.num_batches)
    return rebuild(loader, loader.dataset, loader.generator, batch_sampler=batches)
